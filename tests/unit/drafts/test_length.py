"""Draft length is chosen by time, with an engine whose times are given."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.drafts.length import (
    SWITCHED_OFF,
    Listener,
    TuningConfig,
    choose,
    num_generations,
    running_points,
    sweep,
)
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engine, GenerationResult, RunningTime
from slipstream.records.stages import SweepPoint
from slipstream.records.steps import AcceptanceStats, ScheduleEntry
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup

SAMPLING = SamplingConfig(max_response_tokens=8)
PROMPTS = [Prompt(id=str(i), text="", token_ids=(1,), answer="") for i in range(8)]


class TimedEngine:
    """An engine that takes `seconds[k, batch]`, and notes who generated when."""

    def __init__(self, k: int, seconds: dict[tuple[int, int], float], calls: list[tuple[int, int]]) -> None:
        self.k, self.seconds, self.calls = k, seconds, calls
        self.asked: list[list[str]] = []
        self.settings: list[tuple[SamplingConfig, int, int]] = []

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        batch = len(prompts) * group_size
        self.calls.append((self.k, batch))
        self.asked.append([prompt.id for prompt in prompts])
        self.settings.append((sampling, group_size, seed))
        rollout = Rollout(
            prompt_id="0",
            token_ids=(7,) * (4 + self.k),
            rollout_logprobs=(-1.0,) * (4 + self.k),
            finish_reason=FinishReason.STOP,
            policy_version=0,
            draft_version=None,
        )
        groups = tuple(RolloutGroup(prompt=prompt, rollouts=(rollout,) * group_size) for prompt in prompts)
        acceptance = None
        if self.k:
            acceptance = AcceptanceStats(
                num_drafts=10,
                num_draft_tokens=10 * self.k,
                num_accepted_tokens=10,
                accepted_by_position=(10,) + (0,) * (self.k - 1),
                mean_acceptance_length=2.0,
                acceptance_rate=1 / self.k,
                rate_by_position=(1.0,) + (0.0,) * (self.k - 1),
            )
        return GenerationResult(groups=groups, acceptance=acceptance, generation_s=self.seconds[self.k, batch])

    def close(self) -> None:
        pass


SECONDS = {(0, 2): 4.0, (0, 8): 6.0, (1, 2): 3.0, (1, 8): 8.0, (3, 2): 2.0, (3, 8): 9.0}
CONFIG = TuningConfig(candidate_ks=(0, 1, 3), batch_sizes=(2, 8), num_repeats=2)


def _sweep(calls: list[tuple[int, int]], max_live_engines: int = 2) -> tuple[SweepPoint, ...]:
    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        yield TimedEngine(k, SECONDS, calls)

    config = replace(CONFIG, max_live_engines=max_live_engines)
    return sweep(start, PROMPTS, config=config, sampling=SAMPLING, seed=0).points


def test_every_k_is_measured_in_turn_with_the_baseline() -> None:
    calls: list[tuple[int, int]] = []
    points = _sweep(calls)
    assert [(p.k, p.batch) for p in points] == [(0, 2), (0, 8), (1, 2), (1, 8), (3, 2), (3, 8)]
    assert calls[-4:] == [(0, 8), (3, 8), (3, 8), (0, 8)]


def test_all_engines_that_fit_take_turns_and_each_round_starts_with_another() -> None:
    calls: list[tuple[int, int]] = []
    points = _sweep(calls, max_live_engines=3)
    assert [k for k, batch in calls if batch == 2] == [0, 1, 3, 1, 3, 0]
    assert [p.speedup for p in points if p.k == 3] == [2.0, 6 / 9]


def test_drafting_that_is_switched_off_is_measured_in_the_engine_of_the_longest_drafts() -> None:
    calls: list[tuple[int, int]] = []
    switched: list[tuple[int, int, int]] = []  # whose length, to what, after how many generations
    engines: list[TimedEngine] = []

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        engines.append(TimedEngine(k, SECONDS, calls))
        yield engines[-1]

    def switch(engine: Engine, k: int) -> None:
        assert isinstance(engine, TimedEngine)
        switched.append((engine.k, k, len(calls)))

    generated: list[None] = []
    swept = sweep(
        start,
        PROMPTS,
        config=CONFIG,
        sampling=SAMPLING,
        seed=0,
        switch=switch,
        listener=Listener(on_generated=lambda: generated.append(None)),
    )

    assert [(p.k, p.batch) for p in swept.points] == [(0, 2), (0, 8), (1, 2), (1, 8), (3, 2), (3, 8)]
    assert [sorted(each) for each in swept.rounds] == [[0, 1]] * 4 + [[SWITCHED_OFF, 0, 3]] * 4
    assert len(generated) == num_generations(CONFIG, switches=True) == num_generations(CONFIG) + 4
    # Once to warm up, then once in each round; each time the engine drafts again after the one generation.
    assert [(k, length) for k, length, _ in switched] == [(3, 0), (3, 3)] * 5
    assert all(on - off == 1 for (*_, off), (*_, on) in zip(switched[::2], switched[1::2], strict=True))
    # With its drafts and without them the engine is asked for the same.
    (longest,) = [engine for engine in engines if engine.k == 3]
    assert all(sampling == SAMPLING for sampling, _, _ in longest.settings)
    asked = Counter((group_size, seed) for _, group_size, seed in longest.settings)
    assert all(num % 2 == 0 for num in asked.values())


@pytest.mark.parametrize(("max_live_engines", "known"), [(2, [[1], [1], [3], [3]]), (3, [[1, 3], [1, 3]])])
def test_points_are_told_a_batch_at_a_time_as_soon_as_its_rounds_are_done(
    max_live_engines: int, known: list[list[int]]
) -> None:
    told: list[list[int]] = []
    generated: list[int] = []  # how many batches were known when each generation ended

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        yield TimedEngine(k, SECONDS, [])

    config = replace(CONFIG, max_live_engines=max_live_engines)
    sweep(
        start,
        PROMPTS,
        config=config,
        sampling=SAMPLING,
        seed=0,
        listener=Listener(
            on_points=lambda points: told.append([point.k for point in points]),
            on_generated=lambda: generated.append(len(told)),
        ),
    )

    assert told == known
    assert len(generated) == num_generations(config)
    engines = 1 + len(known[0])
    assert generated == [number for number in range(len(known)) for _ in range(engines * config.num_repeats)]


def test_a_k_is_judged_by_the_baseline_of_its_own_round() -> None:
    """Every round speaks for k=1, by 2, 3 and 4; of the medians of the rounds' seconds one would say 8 / 3."""
    rounds = {0: [1.0, 6.0, 9.0, 8.0], 1: [1.0, 3.0, 3.0, 2.0]}  # the first call warms up

    class Scripted(TimedEngine):
        def generate(self, *args: Any, **kwargs: Any) -> GenerationResult:
            result = super().generate(*args, **kwargs)
            return replace(result, generation_s=rounds[self.k].pop(0))

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        yield Scripted(k, {(0, 8): 0.0, (1, 8): 0.0}, [])

    config = TuningConfig(candidate_ks=(0, 1), batch_sizes=(8,), num_repeats=3)
    _, point = sweep(start, PROMPTS, config=config, sampling=SAMPLING, seed=0).points
    assert (point.speedup, point.generation_s, point.autoregressive_s) == (3.0, 3.0, 8.0)


def test_engines_start_side_by_side_and_all_end_when_one_fails() -> None:
    met = threading.Barrier(2, timeout=10)
    ended: list[int] = []

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        if k:
            met.wait()  # passes only if both are starting
        if k == 3:
            raise RuntimeError("no memory left")
        try:
            yield TimedEngine(k, SECONDS, [])
        finally:
            ended.append(k)

    config = replace(CONFIG, max_live_engines=3, num_starting=2)
    with pytest.raises(RuntimeError, match="no memory left"):
        sweep(start, PROMPTS, config=config, sampling=SAMPLING, seed=0)
    assert ended == [1, 0]


def test_engines_start_one_after_the_other_unless_more_may() -> None:
    together = threading.Barrier(2, timeout=0.2)
    alone: list[bool] = []

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        if k:
            try:
                together.wait()
            except threading.BrokenBarrierError:
                alone.append(True)
                together.reset()
        yield TimedEngine(k, SECONDS, [])

    sweep(start, PROMPTS, config=replace(CONFIG, max_live_engines=3), sampling=SAMPLING, seed=0)
    assert alone == [True, True]


def test_a_batch_is_groups_of_rollouts_and_every_repeat_has_other_prompts() -> None:
    engines: list[TimedEngine] = []

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        engines.append(TimedEngine(k, SECONDS, []))
        yield engines[-1]

    points = sweep(start, PROMPTS[:6], config=CONFIG, sampling=SAMPLING, seed=0, group_size=2).points
    assert [p.batch for p in points[:2]] == [2, 8]
    warm_up, *measured = engines[1].asked  # k = 1
    assert warm_up == ["0", "1", "2", "3"]
    assert measured == [["0"], ["1"], ["0", "1", "2", "3"], ["4", "5", "0", "1"]]
    assert points[2].mean_response_tokens == 5.0
    assert points[2].autoregressive_response_tokens == 4.0
    assert (points[2].longest_response_tokens, points[2].autoregressive_longest_tokens) == (5.0, 4.0)


def test_every_engine_is_asked_alike_and_every_round_has_its_own_seed() -> None:
    engines: list[TimedEngine] = []

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        engines.append(TimedEngine(k, SECONDS, []))
        yield engines[-1]

    sweep(start, PROMPTS, config=CONFIG, sampling=SAMPLING, seed=5, group_size=2)
    rounds = [(SAMPLING, 2, 5), (SAMPLING, 2, 6)]
    warm_up = (SAMPLING, 2, 0)
    baseline, *speculating = engines
    assert baseline.settings == [warm_up, *rounds * 4]  # two batches beside k=1, two beside k=3
    assert [engine.settings for engine in speculating] == [[warm_up, *rounds * 2]] * 2


def test_a_point_is_told_as_soon_as_it_is_known_with_all_that_it_says() -> None:
    """Seconds 3, 2 and 1 of k=1 over 4 in each round: medians 2 and 2, p10 at rank 0.2 and p90 at rank 1.8."""
    seconds = {0: [9.0, 4.0, 4.0, 4.0], 1: [9.0, 3.0, 2.0, 1.0]}

    class Scripted(TimedEngine):
        def generate(self, *args: Any, **kwargs: Any) -> GenerationResult:
            return replace(super().generate(*args, **kwargs), generation_s=seconds[self.k].pop(0))

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        yield Scripted(k, {(0, 8): 0.0, (1, 8): 0.0}, [])

    told: list[SweepPoint] = []
    config = TuningConfig(candidate_ks=(0, 1), batch_sizes=(8,), num_repeats=3)
    listener = Listener(on_points=told.extend)
    baseline, point = sweep(start, PROMPTS, config=config, sampling=SAMPLING, seed=0, listener=listener).points
    assert told == [point]  # the baseline's is known last
    assert point == SweepPoint(
        k=1,
        batch=8,
        generation_s=2.0,
        generation_p10_s=1.2,
        generation_p90_s=2.8,
        num_repeats=3,
        autoregressive_s=4.0,
        speedup=2.0,
        mean_acceptance_length=2.0,
        rate_by_position=(1.0,),
        mean_response_tokens=5.0,
        autoregressive_response_tokens=4.0,
        longest_response_tokens=5.0,
        autoregressive_longest_tokens=4.0,
    )
    assert (baseline.k, baseline.speedup, baseline.mean_acceptance_length, baseline.rate_by_position) == (
        0,
        1.0,
        1.0,
        (),
    )
    assert (baseline.num_repeats, baseline.generation_s, baseline.autoregressive_s) == (3, 4.0, 4.0)


def test_the_baselines_point_holds_the_rounds_beside_every_k() -> None:
    points = _sweep([])
    assert [point.num_repeats for point in points] == [4, 4, 2, 2, 2, 2]


def test_a_batch_that_groups_do_not_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tuning.batch_sizes must be multiples of grpo.group_size 4, got \[2\]"):
        sweep(
            lambda k: pytest.fail("no engine may start"),
            PROMPTS,
            config=CONFIG,
            sampling=SAMPLING,
            seed=0,
            group_size=4,
        )


def test_the_fastest_k_of_the_nearest_batch_wins() -> None:
    points = _sweep([])
    record = choose(points, config=CONFIG, batch=3)
    assert (record.chosen_k, record.points) == (3, points)
    assert record.reason == "k=3 is fastest at batch 2: 2.00x autoregressive (4.00 -> 2.00 s, AL 2.00)"


def test_of_two_batches_equally_near_the_smaller_one_speaks() -> None:
    assert choose(_sweep([]), config=CONFIG, batch=5).chosen_k == 3


def test_a_k_must_be_faster_than_the_least_speedup_and_not_only_as_fast() -> None:
    points = _sweep([])  # at batch 2, k=1 is 4/3 and k=3 twice as fast
    assert choose(points, config=replace(CONFIG, min_speedup=1.9), batch=2).chosen_k == 3
    record = choose(points, config=replace(CONFIG, min_speedup=2.0), batch=2)
    assert record.chosen_k == 0
    assert record.reason == "k=0 wins at batch 2: no draft length is more than 2.00x as fast"
    assert [entry.num_speculative_tokens for entry in record.schedule] == [0]


def test_k_0_is_chosen_and_said_when_speculation_loses() -> None:
    record = choose(_sweep([]), config=CONFIG, batch=8)
    assert record.chosen_k == 0
    assert "k=0 wins at batch 8" in record.reason


def test_a_sweep_keeps_every_rounds_steps_and_the_schedule_is_made_from_them() -> None:
    """k=1 is chosen for whole generations; the steps say that a rollout alone wants k=3."""
    seconds = {0: 4.0, 1: 2.0, 3: 3.0}
    steps = {0: (10, 10, 1.0), 1: (5, 10, 0.5), 3: (3, 10, 0.25)}

    class SteppingEngine(TimedEngine):
        def generate(self, *args: Any, **kwargs: Any) -> GenerationResult:
            num_steps, num_tokens, elapsed_s = steps[self.k]
            time = RunningTime(num_running=1, num_steps=num_steps, num_tokens=num_tokens, elapsed_s=elapsed_s)
            return replace(super().generate(*args, **kwargs), running=(time,))

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        yield SteppingEngine(k, {(k, batch): seconds[k] for batch in (2, 8)}, [])

    config = replace(CONFIG, max_live_engines=3)
    swept = sweep(start, PROMPTS, config=config, sampling=SAMPLING, seed=0)
    assert len(swept.rounds) == 4  # two of each batch size
    assert all(sorted(each) == [0, 1, 3] for each in swept.rounds)

    record = choose(swept.points, config=config, batch=8, rounds=swept.rounds)
    assert record.chosen_k == 1
    assert record.schedule == (
        ScheduleEntry(batch_from=1, batch_to=1, num_speculative_tokens=3),
        ScheduleEntry(batch_from=2, batch_to=8, num_speculative_tokens=1),
    )
    assert record.schedule_gain == pytest.approx(2.0)
    assert record.running == running_points(swept.rounds, chosen_k=1, largest=8)
    three = replace(config, batch_sizes=(2, 4, 8))
    assert choose(swept.points, config=three, batch=8, rounds=swept.rounds).schedule == record.schedule
    assert choose(
        swept.points, config=replace(config, min_schedule_gain=2.1), batch=8, rounds=swept.rounds
    ).schedule == (ScheduleEntry(batch_from=1, batch_to=8, num_speculative_tokens=1),)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"candidate_ks": (1, 3)}, "tuning.candidate_ks must hold 0, the baseline, got (1, 3)"),
        ({"candidate_ks": (0, 3, 1)}, "tuning.candidate_ks must rise, without repeats, got (0, 3, 1)"),
        ({"candidate_ks": (0, 1, 1)}, "tuning.candidate_ks must rise, without repeats, got (0, 1, 1)"),
        ({"candidate_ks": (-1, 0, 1)}, "tuning.candidate_ks must rise, without repeats, got (-1, 0, 1)"),
        ({"candidate_ks": (0,)}, "tuning.candidate_ks must hold a k to compare with 0, got (0,)"),
        ({"batch_sizes": ()}, "tuning.batch_sizes must rise from 1, without repeats, got ()"),
        ({"batch_sizes": (8, 4)}, "tuning.batch_sizes must rise from 1, without repeats, got (8, 4)"),
        ({"batch_sizes": (0, 4)}, "tuning.batch_sizes must rise from 1, without repeats, got (0, 4)"),
        ({"num_repeats": 0}, "tuning.num_repeats must be >= 1, got 0"),
        ({"max_live_engines": 1}, "tuning.max_live_engines must be >= 2, got 1"),
        ({"num_starting": 0}, "tuning.num_starting must be >= 1, got 0"),
        ({"min_speedup": 0.0}, "tuning.min_speedup must be > 0, got 0.0"),
        ({"min_schedule_gain": 0.99}, "tuning.min_schedule_gain must be >= 1, got 0.99"),
    ],
)
def test_a_sweep_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(TuningConfig, **values) == message


def test_a_sweep_on_its_bounds_is_taken() -> None:
    config = TuningConfig(
        candidate_ks=(0, 1),
        batch_sizes=(1,),
        num_repeats=1,
        max_live_engines=2,
        num_starting=1,
        min_speedup=0.5,
        min_schedule_gain=1.0,
    )
    assert config.batch_sizes == (1,)


def test_too_few_prompts_for_the_largest_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tuning.batch_sizes must be at most the 8 rollouts of the prompts, got 16"):
        sweep(
            lambda k: pytest.fail("no engine may start"),
            PROMPTS,
            config=TuningConfig(candidate_ks=(0, 1), batch_sizes=(16,)),
            sampling=SAMPLING,
            seed=0,
        )
