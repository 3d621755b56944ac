"""Draft length is chosen by time: by the sweep, by running batch, and by the autopilot during a run."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.config import ConfigError
from slipstream.drafts import length
from slipstream.drafts.length import (
    SWITCHED_OFF,
    Decision,
    DraftLength,
    Round,
    Sweep,
    TuningConfig,
    choose,
    compare,
    constant,
    decide,
    described,
    expected_gain,
    length_of,
    running_points,
    schedule,
    sweep,
    with_faster_drafts,
)
from slipstream.drafts.methods import DraftSampling
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engines, GenerationResult, RunningTime
from slipstream.records.stages import SweepPoint, TuningRecord
from slipstream.records.steps import AutopilotStep, ScheduleEntry
from slipstream.types import Prompt, RolloutGroup
from tests.unit.sampled import accepted, rollout

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
        one = rollout((7,) * (4 + self.k), -1.0)
        groups = tuple(RolloutGroup(prompt=prompt, rollouts=(one,) * group_size) for prompt in prompts)
        acceptance = accepted(10, 10, *(0,) * (self.k - 1)) if self.k else None
        return GenerationResult(groups=groups, acceptance=acceptance, generation_s=self.seconds[self.k, batch])


class ScriptedEngine(TimedEngine):
    """An engine whose generations take these seconds, one after the other."""

    def __init__(self, k: int, rounds: Sequence[float]) -> None:
        super().__init__(k, defaultdict(float), [])
        self.rounds = iter(rounds)

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
        return replace(super().generate(prompts, **how), generation_s=next(self.rounds))


SECONDS = {(0, 2): 4.0, (0, 8): 6.0, (1, 2): 3.0, (1, 8): 8.0, (3, 2): 2.0, (3, 8): 9.0}
CONFIG = TuningConfig(candidate_ks=(0, 1, 3), batch_sizes=(2, 8), num_repeats=2)


def swept(
    engine: Callable[[int], TimedEngine],
    config: TuningConfig = CONFIG,
    into: list[TimedEngine] | None = None,
    **how: Any,
) -> Sweep:
    """The sweep of engines that `engine` makes of a k, which are kept in `into`."""

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        made = engine(k)
        if into is not None:
            into.append(made)
        yield made

    return sweep(start, **{"prompts": PROMPTS, "config": config, "sampling": SAMPLING, "seed": 0, **how})


def timed(
    seconds: dict[tuple[int, int], float], calls: list[tuple[int, int]] | None = None
) -> Callable[[int], TimedEngine]:
    return lambda k: TimedEngine(k, seconds, [] if calls is None else calls)


def _sweep(calls: list[tuple[int, int]], max_live_engines: int = 2) -> tuple[SweepPoint, ...]:
    return swept(timed(SECONDS, calls), replace(CONFIG, max_live_engines=max_live_engines)).points


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


@pytest.mark.parametrize(
    ("fastest", "live", "measured"),
    [
        (3, 2, [[3], [2], [5]]),  # both neighbours of the middle are slower
        (7, 2, [[3], [2], [5], [7]]),
        (1, 2, [[3], [2], [1]]),
        (3, 4, [[2, 3, 5]]),
        (7, 4, [[2, 3, 5], [7]]),
        (7, 6, [[1, 2, 3, 5, 7]]),
    ],
)
def test_where_not_all_engines_fit_the_middle_comes_first_and_then_neighbours_of_the_fastest(
    fastest: int, live: int, measured: list[list[int]]
) -> None:
    ks = (0, 1, 2, 3, 5, 7)
    seconds = {(k, batch): 10.0 + abs(k - fastest) for k in ks for batch in (2, 8)}
    seconds |= {(k, 2): 10.0 + k for k in ks}  # the smaller batch does not decide
    told: list[list[int]] = []

    def on_points(points: Sequence[SweepPoint]) -> None:
        if points[0].batch == 8:
            told.append([point.k for point in points])

    config = replace(CONFIG, candidate_ks=ks, max_live_engines=live)
    swept(timed(seconds), config, on_points=on_points)
    assert told == measured


def test_a_schedule_is_made_of_every_length() -> None:
    ks = (0, 1, 2, 3, 5, 7)
    seconds = {(k, batch): 10.0 for k in ks for batch in (2, 8)}
    found = swept(timed(seconds), replace(CONFIG, candidate_ks=ks), switch=lambda engine, k: None)
    assert sorted({point.k for point in found.points}) == list(ks)


def test_drafting_that_is_switched_off_is_measured_in_the_engine_of_the_longest_drafts() -> None:
    calls: list[tuple[int, int]] = []
    switched: list[tuple[int, int, int]] = []  # whose length, to what, after how many generations
    engines: list[TimedEngine] = []

    def switch(engine: Engines, k: int) -> None:
        assert isinstance(engine, TimedEngine)
        switched.append((engine.k, k, len(calls)))

    found = swept(timed(SECONDS, calls), into=engines, switch=switch)

    assert [(p.k, p.batch) for p in found.points] == [(0, 2), (0, 8), (1, 2), (1, 8), (3, 2), (3, 8)]
    assert [sorted(each) for each in found.rounds] == [[0, 1]] * 4 + [[SWITCHED_OFF, 0, 3]] * 4
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
    calls: list[tuple[int, int]] = []
    num_calls: list[int] = []

    def on_points(points: Sequence[SweepPoint]) -> None:
        told.append([point.k for point in points])
        num_calls.append(len(calls))

    config = replace(CONFIG, max_live_engines=max_live_engines)
    swept(timed(SECONDS, calls), config, on_points=on_points)
    assert told == known
    rounds = (1 + len(known[0])) * config.num_repeats
    assert [after - before for before, after in pairwise(num_calls)][::2] == [rounds] * (len(known) // 2)


def test_a_k_is_judged_by_the_baseline_of_its_own_round() -> None:
    """Every round speaks for k=1, by 2, 3 and 4; of the medians of the rounds' seconds one would say 8 / 3."""
    rounds = {0: [1.0, 6.0, 9.0, 8.0], 1: [1.0, 3.0, 3.0, 2.0]}  # the first call warms up
    config = TuningConfig(candidate_ks=(0, 1), batch_sizes=(8,), num_repeats=3)
    _, point = swept(lambda k: ScriptedEngine(k, rounds[k]), config).points
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

    config = replace(CONFIG, max_live_engines=3)
    with pytest.raises(RuntimeError, match="no memory left"):
        sweep(start, PROMPTS, config=config, sampling=SAMPLING, seed=0)
    assert ended == [1, 0]


def test_a_batch_is_groups_of_rollouts_and_every_repeat_has_other_prompts() -> None:
    engines: list[TimedEngine] = []
    points = swept(timed(SECONDS), into=engines, prompts=PROMPTS[:6], group_size=2).points
    assert [p.batch for p in points[:2]] == [2, 8]
    warm_up, *measured = engines[1].asked  # k = 1
    assert warm_up == ["0", "1", "2", "3"]
    assert measured == [["0"], ["1"], ["0", "1", "2", "3"], ["4", "5", "0", "1"]]
    assert points[2].mean_response_tokens == 5.0
    assert points[2].autoregressive_response_tokens == 4.0
    assert (points[2].longest_response_tokens, points[2].autoregressive_longest_tokens) == (5.0, 4.0)


def test_every_engine_is_asked_alike_and_every_round_has_its_own_seed() -> None:
    engines: list[TimedEngine] = []
    swept(timed(SECONDS), into=engines, seed=5, group_size=2)
    rounds = [(SAMPLING, 2, 5), (SAMPLING, 2, 6)]
    warm_up = (SAMPLING, 2, 0)
    baseline, *speculating = engines
    assert baseline.settings == [warm_up, *rounds * 4]  # two batches beside k=1, two beside k=3
    assert [engine.settings for engine in speculating] == [[warm_up, *rounds * 2]] * 2


def test_a_point_is_told_as_soon_as_it_is_known_with_all_that_it_says() -> None:
    """Seconds 3, 2 and 1 of k=1 over 4 in each round: medians 2 and 2, p10 at rank 0.2 and p90 at rank 1.8."""
    seconds = {0: [9.0, 4.0, 4.0, 4.0], 1: [9.0, 3.0, 2.0, 1.0]}
    told: list[SweepPoint] = []
    config = TuningConfig(candidate_ks=(0, 1), batch_sizes=(8,), num_repeats=3)
    baseline, point = swept(lambda k: ScriptedEngine(k, seconds[k]), config, on_points=told.extend).points
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
    assert (baseline.k, baseline.num_repeats, baseline.generation_s, baseline.autoregressive_s) == (0, 3, 4.0, 4.0)
    assert (baseline.speedup, baseline.mean_acceptance_length, baseline.rate_by_position) == (1.0, 1.0, ())


def test_a_batch_that_groups_do_not_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tuning.batch_sizes must be multiples of grpo.group_size 4, got \[2\]"):
        swept(lambda k: pytest.fail("no engine may start"), group_size=4)


def test_the_fastest_k_of_the_nearest_batch_wins() -> None:
    points = _sweep([])
    record = choose(points, config=CONFIG, batch=3)
    assert (record.chosen_k, record.points) == (3, points)
    assert record.reason == "k=3 is fastest at batch 2: 2.00x autoregressive (4.00 -> 2.00 s, AL 2.00)"


def test_of_two_batches_equally_near_the_smaller_one_speaks() -> None:
    assert choose(_sweep([]), config=CONFIG, batch=5).chosen_k == 3


def test_a_k_must_be_faster_and_not_only_as_fast() -> None:
    points = [replace(point, speedup=min(point.speedup, 1.0)) for point in _sweep([])]
    record = choose(points, config=CONFIG, batch=2)
    assert record.chosen_k == 0
    assert record.reason == "k=0 wins at batch 2: no draft length is faster"
    assert [entry.num_speculative_tokens for entry in record.schedule] == [0]


def test_a_sweep_keeps_every_rounds_steps_and_the_schedule_is_made_from_them() -> None:
    """k=1 is chosen for whole generations; the steps say that a rollout alone wants k=3."""
    seconds = {0: 4.0, 1: 2.0, 3: 2.2}
    steps = {0: (1750, 1750), 1: (750, 750), 3: (350, 1250)}  # ms of one rollout alone and of two

    class SteppingEngine(TimedEngine):
        def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
            running = tuple(time(n, steps=5, tokens=10 * n, ms=ms) for n, ms in enumerate(steps[self.k], start=1))
            return replace(super().generate(prompts, **how), running=running)

    config = replace(CONFIG, max_live_engines=3)
    found = swept(lambda k: SteppingEngine(k, {(k, batch): seconds[k] for batch in (2, 8)}, []), config)
    assert len(found.rounds) == 4  # two of each batch size
    assert all(sorted(each) == [0, 1, 3] for each in found.rounds)

    record = choose(found.points, config=config, batch=8, rounds=found.rounds)
    assert record.chosen_k == 1
    assert record.schedule == (
        ScheduleEntry(batch_from=1, batch_to=1, num_speculative_tokens=3),
        ScheduleEntry(batch_from=2, batch_to=8, num_speculative_tokens=1),
    )
    assert record.schedule_gain == pytest.approx(2.0 / (0.35 + 0.75 + 0.6))  # 0.6 s of prompts with k=3
    assert record.running == running_points(found.rounds, chosen_k=1, largest=8)
    three = replace(config, batch_sizes=(2, 4, 8))
    assert choose(found.points, config=three, batch=8, rounds=found.rounds).schedule == record.schedule


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"candidate_ks": (1, 3)}, "tuning.candidate_ks must hold 0, the baseline, got (1, 3)"),
        ({"candidate_ks": (0, 3, 1)}, "tuning.candidate_ks must rise, without repeats, got (0, 3, 1)"),
        ({"candidate_ks": (0, 1, 1)}, "tuning.candidate_ks must rise, without repeats, got (0, 1, 1)"),
        ({"candidate_ks": (-1, 0, 1)}, "tuning.candidate_ks[0] must be >= 0, got -1"),
        ({"candidate_ks": (0,)}, "tuning.candidate_ks must hold a k to compare with 0, got (0,)"),
    ],
)
def test_a_sweep_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(TuningConfig, **values) == message


def test_too_few_prompts_for_the_largest_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tuning.batch_sizes must be at most the 8 rollouts of the prompts, got 16"):
        swept(lambda k: pytest.fail("no engine may start"), TuningConfig(candidate_ks=(0, 1), batch_sizes=(16,)))


def time(num_running: int, *, steps: int, tokens: int, ms: float) -> RunningTime:
    return RunningTime(num_running=num_running, num_steps=steps, num_tokens=tokens, elapsed_s=ms / 1e3)


def entry(start: int, end: int, k: int) -> ScheduleEntry:
    return ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k)


def decoded(*running: RunningTime, prompts_ms: float = 0.0) -> GenerationResult:
    """A generation of these steps, and of others that compute prompts."""
    seconds = sum(each.elapsed_s for each in running) + prompts_ms / 1e3
    return GenerationResult(groups=(), acceptance=None, generation_s=seconds, running=running)


# Two rollouts: 10 steps of 2 tokens without a draft, 4 steps with one of 2. Then one alone.
ROUND: Round = {
    0: decoded(time(1, steps=10, tokens=10, ms=100), time(2, steps=10, tokens=20, ms=100)),
    2: decoded(time(1, steps=4, tokens=10, ms=50), time(2, steps=4, tokens=20, ms=125)),
}


def test_the_cost_of_a_k_is_the_time_in_which_every_running_rollout_gains_a_token() -> None:
    points = running_points([ROUND], chosen_k=2, largest=2)
    assert [(p.k, p.batch_from, p.batch_to) for p in points] == [(0, 1, 1), (2, 1, 1), (0, 2, 2), (2, 2, 2)]
    # 10 tokens of a rollout in 100, 50, 100 and 125 ms.
    assert [p.token_ms for p in points] == pytest.approx([10.0, 5.0, 10.0, 12.5])
    assert [p.tokens_per_step for p in points] == [1.0, 2.5, 1.0, 2.5]
    assert [p.speedup for p in points] == pytest.approx([1.0, 2.0, 1.0, 0.8])
    assert [p.gain for p in points] == pytest.approx([0.5, 1.0, 1.25, 1.0])
    assert [p.num_rounds for p in points] == [1, 1, 1, 1]


def test_running_batches_are_taken_together_in_ranges_that_double() -> None:
    times = [time(num, steps=1, tokens=num, ms=num) for num in range(1, 13)]
    points = running_points([{0: decoded(*times)}], chosen_k=0, largest=12)
    assert [(p.batch_from, p.batch_to) for p in points] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 12)]
    # 9 + 10 + 11 + 12 ms for four tokens a rollout.
    assert points[-1].token_ms == pytest.approx(42 / 4)
    assert points[-1].num_steps == 4


# k=5 is twice as fast as k=2 for one rollout alone, and slower for two.
LONG: Round = {**ROUND, 5: decoded(time(1, steps=2, tokens=10, ms=25), time(2, steps=2, tokens=20, ms=250))}


def table_of(rounds: list[Round], *, chosen_k: int = 2, min_gain: float = 1.03) -> tuple[ScheduleEntry, ...]:
    points = running_points(rounds, chosen_k=chosen_k, largest=2)
    return schedule(points, rounds, chosen_k=chosen_k, largest=2, min_gain=min_gain)


def test_a_k_that_is_faster_at_a_running_batch_takes_it_from_the_chosen_one() -> None:
    rounds = [LONG, LONG]
    table = table_of(rounds)
    assert table == (entry(1, 1, 5), entry(2, 2, 2))
    # Of the chosen k's 175 ms, the 50 for one rollout alone become 25.
    points = running_points(rounds, chosen_k=2, largest=2)
    assert expected_gain(points, table, rounds, chosen_k=2) == pytest.approx(175 / 150)


def test_a_table_that_gains_too_little_over_all_is_none() -> None:
    rounds = [LONG, LONG]
    assert table_of(rounds, min_gain=1.17) == (entry(1, 2, 2),)
    points = running_points(rounds, chosen_k=2, largest=2)
    gain = expected_gain(points, (entry(1, 1, 5), entry(2, 2, 2)), rounds, chosen_k=2)
    assert table_of(rounds, min_gain=gain) == (entry(1, 1, 5), entry(2, 2, 2))


def test_a_table_pays_for_the_prompts_in_its_own_engine() -> None:
    """Without a draft 200 ms and 100 of prompts; by the table 150, and `prompts_ms` in the engine of k=2."""

    def table_at(prompts_ms: float) -> tuple[tuple[ScheduleEntry, ...], float]:
        before = switched_off(alone_ms=120, both_ms=100)
        without = decoded(*before[0].running, prompts_ms=100)
        rounds = [{**before, 0: without, 2: decoded(*before[2].running, prompts_ms=prompts_ms)}] * 2
        points = running_points(rounds, chosen_k=0, largest=2)
        gain = expected_gain(points, (entry(1, 1, 2), entry(2, 2, 0)), rounds, chosen_k=0)
        return schedule(points, rounds, chosen_k=0, largest=2), gain

    assert table_at(100) == ((entry(1, 1, 2), entry(2, 2, 0)), pytest.approx(300 / 250))
    assert table_at(144) == ((entry(1, 2, 0),), pytest.approx(300 / 294))
    assert table_at(300) == ((entry(1, 2, 0),), pytest.approx(300 / 450))


def test_a_k_that_is_only_as_fast_as_the_chosen_one_takes_nothing() -> None:
    equal: Round = {**LONG, 5: decoded(time(1, steps=2, tokens=10, ms=25), time(2, steps=2, tokens=20, ms=125))}
    assert table_of([equal, equal], min_gain=1.0) == (entry(1, 1, 5), entry(2, 2, 2))


def test_a_range_of_several_batches_changes_hands_as_a_whole() -> None:
    """k=1 is twice as fast as k=2 for three and four, and half as fast for one and two."""
    both: Round = {
        k: decoded(*(time(num, steps=5, tokens=10 * num, ms=ms[num > 2]) for num in (1, 2, 3, 4)))
        for k, ms in ((2, (50, 80)), (1, (100, 40)))
    }
    points = running_points([both, both], chosen_k=2, largest=4)
    table = schedule(points, [both, both], chosen_k=2, largest=4)
    assert table == (entry(1, 2, 2), entry(3, 4, 1))
    # Of 50 + 50 + 80 + 80 ms the last two halve.
    assert expected_gain(points, table, [both, both], chosen_k=2) == pytest.approx(260 / 180)


def test_where_length_0_was_not_measured_in_an_engine_with_a_draft_it_takes_as_long_as_without() -> None:
    off = {SWITCHED_OFF: decoded(time(1, steps=10, tokens=10, ms=120)), 2: decoded(ROUND[2].running[0]), 0: ROUND[0]}
    rounds: list[Round] = [off, off]
    points = running_points(rounds, chosen_k=0, largest=2)
    table = schedule(points, rounds, chosen_k=0, largest=2)
    assert table == (entry(1, 1, 2), entry(2, 2, 0))
    # 100 ms for one rollout alone become 50; 100 for two stay.
    assert expected_gain(points, table, rounds, chosen_k=0) == pytest.approx(200 / 150)


def test_one_round_is_no_evidence_and_of_several_their_geometric_mean_decides() -> None:
    """Gains of 2, 2 and 50 / 55: a mean of 1.54; of 2 and 50 / 220 a mean of 0.67."""
    assert table_of([LONG]) == (entry(1, 2, 2),)
    denied, refuted = ({**LONG, 5: decoded(time(1, steps=2, tokens=10, ms=ms), LONG[5].running[1])} for ms in (55, 220))
    points = running_points([LONG, LONG, denied], chosen_k=2, largest=2)
    of_5 = next(point for point in points if (point.k, point.batch_from) == (5, 1))
    assert (of_5.gain, of_5.gain_low) == pytest.approx(((2 * 2 * 50 / 55) ** (1 / 3), 50 / 55))
    assert table_of([LONG, LONG, denied]) == (entry(1, 1, 5), entry(2, 2, 2))
    assert table_of([LONG, refuted]) == (entry(1, 2, 2),)


def test_the_speed_of_an_engine_without_a_draft_gives_length_0_no_range() -> None:
    """At two rollouts it is faster than k=2; but there is no engine that drops its draft."""
    assert table_of([ROUND, ROUND]) == (entry(1, 2, 2),)
    assert table_of([LONG, LONG], chosen_k=0) == (entry(1, 2, 0),)


def switched_off(*, alone_ms: float, both_ms: float) -> Round:
    """`ROUND`, with an engine that drafts nothing although it has a draft."""
    return {
        **ROUND,
        SWITCHED_OFF: decoded(time(1, steps=10, tokens=10, ms=alone_ms), time(2, steps=10, tokens=20, ms=both_ms)),
    }


def test_drafting_is_switched_off_where_an_engine_with_a_draft_was_faster_so() -> None:
    rounds = [switched_off(alone_ms=120, both_ms=110)] * 2
    points = running_points(rounds, chosen_k=2, largest=2)
    off = [point for point in points if point.is_switched_off]
    assert [(point.k, point.batch_from) for point in off] == [(0, 1), (0, 2)]
    assert [point.gain for point in off] == pytest.approx([50 / 120, 125 / 110])
    assert [point.speedup for point in off] == pytest.approx([100 / 120, 100 / 110])
    table = table_of(rounds)
    assert table == (entry(1, 1, 2), entry(2, 2, 0))
    assert expected_gain(points, table, rounds, chosen_k=2) == pytest.approx(175 / 160)
    assert table_of([switched_off(alone_ms=120, both_ms=126)] * 2) == (entry(1, 2, 2),)


def test_where_no_k_pays_throughout_one_may_still_in_the_tail_if_that_outweighs_the_drafts_first_pass() -> None:
    """Without a draft 200 ms. With one: 50 alone by k=2, and `both_ms` for two without drafts."""
    rounds = [switched_off(alone_ms=120, both_ms=110)] * 2
    table = table_of(rounds, chosen_k=0)
    assert table == (entry(1, 1, 2), entry(2, 2, 0))
    points = running_points(rounds, chosen_k=0, largest=2)
    assert expected_gain(points, table, rounds, chosen_k=0) == pytest.approx(200 / 160)
    # At two rollouts switching off is dearer than k=2 there: a table is k=2 throughout, which is no table.
    assert table_of([switched_off(alone_ms=120, both_ms=130)] * 2, chosen_k=0) == (entry(1, 2, 0),)
    assert table_of(rounds, chosen_k=0, min_gain=1.26) == (entry(1, 2, 0),)


def test_where_no_k_pays_throughout_each_range_goes_to_the_fastest_however_unsure() -> None:
    """Without drafts two rollouts take 130 ms in an engine with one, or 70; k=2 takes 125 both times, and 50 alone."""
    rounds = [switched_off(alone_ms=120, both_ms=130), switched_off(alone_ms=120, both_ms=70)]
    assert table_of(rounds, chosen_k=0) == (entry(1, 1, 2), entry(2, 2, 0)) == table_of(rounds)
    assert table_of(rounds[1:], chosen_k=0) == (entry(1, 2, 0),)  # one round is no evidence


def test_a_k_that_never_met_the_chosen_one_is_compared_with_it_through_k_0() -> None:
    other: Round = {0: decoded(time(1, steps=10, tokens=10, ms=200)), 5: decoded(time(1, steps=2, tokens=10, ms=50))}
    rounds = [ROUND, other, ROUND, other]
    # k=5 is 4 times as fast as k=0 in its rounds, k=2 twice in its own.
    (point,) = [point for point in running_points(rounds, chosen_k=2, largest=1) if point.k == 5]
    assert (point.gain, point.gain_low) == pytest.approx((2.0, 2.0))
    assert table_of(rounds) == (entry(1, 1, 5), entry(2, 2, 2))
    assert table_of([ROUND, other]) == (entry(1, 2, 2),)  # a round of each is no evidence


def test_a_k_that_met_neither_the_chosen_one_nor_k_0_takes_nothing() -> None:
    alone: Round = {5: decoded(time(1, steps=2, tokens=10, ms=1))}
    assert table_of([ROUND, ROUND, alone, alone]) == (entry(1, 2, 2),)
    points = running_points([ROUND, ROUND, alone, alone], chosen_k=2, largest=2)
    assert [(p.gain, p.gain_low) for p in points if p.k == 5] == [(1.0, 0.0)]


def test_rounds_without_k_0_or_without_the_chosen_k_say_nothing_of_it() -> None:
    apart: list[Round] = [{2: ROUND[2]}, {5: LONG[5]}]
    points = running_points(apart, chosen_k=2, largest=1)
    assert [(p.k, p.speedup, p.gain, p.gain_low) for p in points] == [(2, None, 1.0, 0.0), (5, None, 1.0, 0.0)]
    points = running_points([{0: ROUND[0], 5: LONG[5]}], chosen_k=2, largest=1)
    assert [(p.k, p.speedup, p.gain) for p in points] == [(0, 1.0, 1.0), (5, pytest.approx(4.0), 1.0)]


def test_where_no_engine_without_a_draft_came_there_is_no_speedup_to_tell() -> None:
    points = running_points([{0: decoded(time(2, steps=1, tokens=2, ms=1)), 2: ROUND[2]}], chosen_k=2, largest=2)
    assert [point.speedup is None for point in points if point.k == 2] == [True, False]


def test_without_rounds_the_table_is_the_chosen_k() -> None:
    assert schedule((), (), chosen_k=3, largest=48) == (entry(1, 48, 3),)
    assert expected_gain((), constant(3), (), chosen_k=3) == 1.0


@given(
    largest=st.integers(1, 300),
    chosen_k=st.sampled_from([0, 2, 7]),
    costs=st.dictionaries(
        st.tuples(st.sampled_from([SWITCHED_OFF, 0, 2, 7]), st.integers(1, 300)), st.floats(0.1, 9.0)
    ),
)
def test_a_table_covers_every_running_batch_once_whatever_was_measured(
    largest: int, chosen_k: int, costs: dict[tuple[int, int], float]
) -> None:
    by_k = {
        k: decoded(*(time(num, steps=1, tokens=num, ms=ms) for (of, num), ms in sorted(costs.items()) if of == k))
        for k in (SWITCHED_OFF, 0, 2, 7)
    }
    rounds = [by_k, by_k]
    points = running_points(rounds, chosen_k=chosen_k, largest=largest)
    table = schedule(points, rounds, chosen_k=chosen_k, largest=largest, min_gain=1.0)
    covered = [num for each in table for num in range(each.batch_from, each.batch_to + 1)]
    assert covered == list(range(1, largest + 1))
    assert all(a.num_speculative_tokens != b.num_speculative_tokens for a, b in pairwise(table))
    assert expected_gain(points, table, rounds, chosen_k=chosen_k) >= 1.0 - 1e-9


def _record(*table: ScheduleEntry, chosen_k: int = 3) -> TuningRecord:
    return TuningRecord(chosen_k=chosen_k, reason="told so", points=(), schedule=table)


def test_a_table_of_one_k_is_the_best_fixed_k_and_no_table() -> None:
    length = length_of(_record(entry(1, 48, 3)), by_batch=True)
    assert length == DraftLength(num_speculative_tokens=3)
    assert length.label == "3"


def test_a_table_of_several_is_taken_only_where_it_is_asked_for() -> None:
    record = _record(entry(1, 8, 7), entry(9, 48, 2))
    length = length_of(record, by_batch=True)
    assert length == DraftLength(num_speculative_tokens=7, schedule=record.schedule)
    assert length.label == "by_batch"
    assert length_of(record, by_batch=False) == DraftLength(num_speculative_tokens=3)


class KindEngine(ScriptedEngine):
    """An engine of drafts of one kind, three tokens long; it notes the order of all generations."""

    def __init__(self, kind: DraftSampling, rounds: list[float], order: list[tuple[DraftSampling, int]]) -> None:
        super().__init__(3, rounds)
        self.kind, self.order = kind, order

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
        self.order.append((self.kind, how["seed"]))
        return super().generate(prompts, **how)


def _compared(greedy: list[float], calls: list[tuple[DraftSampling, int]] | None = None) -> TuningRecord:
    """Three rounds at a batch of 8, the nearest to 7, in which probabilistic drafts take 2, 4 and 6 seconds."""
    seconds = {DraftSampling.PROBABILISTIC: [9.0, 2.0, 4.0, 6.0], DraftSampling.GREEDY: [9.0, *greedy]}

    @contextmanager
    def start(kind: DraftSampling) -> Iterator[Engines]:
        yield KindEngine(kind, seconds[kind], [] if calls is None else calls)

    config = replace(CONFIG, num_repeats=3)
    points = compare(start, PROMPTS, config=config, sampling=SAMPLING, seed=5, batch=7, group_size=2)
    assert [(point.batch, point.num_repeats, point.mean_acceptance_length) for point in points] == [(8, 3, 2.0)] * 2
    return with_faster_drafts(_record(), points)


def test_both_kinds_of_drafts_generate_in_turn_and_the_median_of_their_rounds_decides() -> None:
    calls: list[tuple[DraftSampling, int]] = []
    record = _compared([1.0, 8.0, 5.0], calls)  # ratios 2.0, 0.5 and 1.2
    assert [each.value[0] for each, _ in calls] == ["p", "g", "p", "g", "g", "p", "p", "g"]
    assert [seed for _, seed in calls] == [0, 0, 5, 5, 6, 6, 7, 7]
    assert [(point.sampling, point.gain) for point in record.samplings] == [("probabilistic", 1.0), ("greedy", 1.2)]
    assert record.sampling == "greedy"
    assert record.reason == (
        "told so; greedy drafts: greedy ones generate 1.20x as fast as probabilistic ones (4.00 -> 5.00 s)"
    )
    assert length_of(record, by_batch=False).sampling is DraftSampling.GREEDY
    assert length_of(replace(record, schedule=(entry(1, 8, 7), entry(9, 48, 2))), by_batch=True) == DraftLength(
        num_speculative_tokens=7, schedule=(entry(1, 8, 7), entry(9, 48, 2)), sampling=DraftSampling.GREEDY
    )


@pytest.mark.parametrize("greedy", [[2.0, 4.0, 6.0], [1.0, 8.0, 7.0]])
def test_greedy_drafts_that_are_no_faster_are_not_taken(greedy: list[float]) -> None:
    record = _compared(greedy)
    assert record.sampling == "probabilistic"
    assert len(record.samplings) == 2


def test_a_table_is_described_range_by_range() -> None:
    assert described((entry(1, 8, 7), entry(9, 48, 2))) == "1-8: 7, 9-48: 2"


Cost = Callable[[int, bool], float]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes after four steps."""
    monkeypatch.setattr(length, "_PROBE_EVERY_STEPS", 4)


def flown(cost: Cost, num_steps: int) -> list[AutopilotStep]:
    """Steps of a run whose step i costs `cost(i, speculates)`."""
    steps: list[AutopilotStep] = []
    for index in range(num_steps):
        decision = decide(steps)
        steps.append(
            AutopilotStep(
                speculates=decision.speculates,
                is_probe=decision.is_probe,
                token_ms=cost(index, decision.speculates),
                has_switched=decision.has_switched,
            )
        )
    return steps


def pattern(steps: list[AutopilotStep]) -> str:
    """S and P speculate, s and p do not; p and P are probes."""
    letters = {(True, False): "S", (True, True): "P", (False, False): "s", (False, True): "p"}
    return "".join(letters[step.speculates, step.is_probe] for step in steps)


def test_where_speculation_pays_it_is_probed_ever_more_rarely_and_never_left() -> None:
    steps = flown(lambda i, speculates: 1.0 if speculates else 2.0, 40)
    # The first step warms up, three say what speculation costs, then k = 0 is looked at; after 8 and 16 steps again.
    assert pattern(steps) == "SSSSp" + "SSSSSSSp" + "S" * 15 + "p" + "S" * 11


def test_where_speculation_loses_from_the_start_it_is_left_after_two_probes_that_agree() -> None:
    steps = flown(lambda i, speculates: 2.0 if speculates else 1.0, 24)
    # On: 4 steps, two probes, off. Then a probe of drafting after 4 steps, 8, ...
    assert pattern(steps) == "SSSSpp" + "ssssP" + "sssssssP" + "sssss"
    assert [index for index, step in enumerate(steps) if step.has_switched] == [6]


def test_a_draft_that_recovers_is_taken_up_again() -> None:
    steps = flown(lambda i, speculates: 1.0 if not speculates else 2.0 if i < 8 else 0.5, 20)
    assert pattern(steps) == "SSSSpp" + "ssss" + "PP" + "SSSSp" + "SSS"
    assert [index for index, step in enumerate(steps) if step.has_switched] == [6, 12]


def test_a_collapse_is_probed_at_once_after_the_steps_that_lost() -> None:
    steps = flown(lambda i, speculates: 1.0 if not speculates else 0.5 if i < 20 else 3.0, 30)
    # Steps 20 to 22 lose; 23 and 24 are probes that agree, 25 is off.
    assert pattern(steps)[20:26] == "SSSpps"


def test_one_slow_step_turns_nothing() -> None:
    steps = flown(lambda i, speculates: 9.0 if i == 8 else 1.0 if speculates else 2.0, 40)
    assert not any(step.has_switched for step in steps)


def test_the_first_step_which_pays_for_allocations_counts_for_nothing() -> None:
    steps = flown(lambda i, speculates: 99.0 if i == 0 else 1.0 if speculates else 2.0, 4)
    assert decide(steps).own_ms == 1.0


def test_a_decision_shows_the_median_of_the_last_steps_and_the_last_cost_of_the_other_way() -> None:
    costs = [99.0, 8.0, 1.0, 3.0, 2.0]

    def cost(index: int, speculates: bool) -> float:
        return costs[index] if speculates else 5.0

    assert decide([]) == Decision(speculates=True, is_probe=False, has_switched=False)
    assert decide(flown(cost, 3)) == Decision(speculates=True, is_probe=False, has_switched=False)
    assert decide(flown(cost, 4)) == Decision(
        speculates=False, is_probe=True, has_switched=False, own_ms=3.0, other_ms=None
    )
    costs = [99.0, 8.0, 1.0, 3.0, 0.0, 2.0]
    assert decide(flown(cost, 6)) == Decision(
        speculates=True, is_probe=False, has_switched=False, own_ms=2.0, other_ms=5.0
    )


def test_a_way_that_costs_more_by_the_margin_and_nothing_else_has_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter is exact in binary."""
    monkeypatch.setattr(length, "_MARGIN", 0.25)
    at, above = (flown(lambda i, speculates, cost=cost: cost if speculates else 4.0, 12) for cost in (5.0, 5.1))
    assert not any(step.has_switched for step in at)
    assert [index for index, step in enumerate(above) if step.has_switched] == [6]


def test_probes_that_are_older_than_the_steps_which_lose_turn_nothing() -> None:
    """Drafting costs 1, then 3 from step 9 on: beside the probe of step 12 that of step 4 is too old, so 13 is one."""
    steps = flown(lambda i, speculates: 2.0 if not speculates else 1.0 if i < 9 else 3.0, 16)
    assert pattern(steps) == "SSSSp" + "SSSSSSS" + "pp" + "ss"


@given(ratio=st.floats(0.2, 1.009), noise=st.lists(st.floats(-0.02, 0.02), min_size=60, max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_speculation_that_does_not_lose_by_the_margin_is_never_left(ratio: float, noise: list[float]) -> None:
    """Whatever noise leaves the ratio of any two steps below the margin."""
    steps = flown(lambda i, speculates: (ratio if speculates else 1.0) * (1.0 + noise[i]), 60)
    assert not any(step.has_switched for step in steps)


@given(at=st.integers(0, 40), before=st.floats(0.2, 1.0), after=st.floats(1.2, 10.0))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_a_collapse_so_many_steps_draft_as_patience_allows_and_then_none_but_probes(
    at: int, before: float, after: float
) -> None:
    steps = flown(lambda i, speculates: 1.0 if not speculates else before if i < at else after, 80)
    drafted = [index for index, step in enumerate(steps) if index >= at and step.speculates and not step.is_probe]
    warm_up = 1 if at == 0 else 0
    assert len(drafted) <= length.PATIENCE_STEPS + warm_up
    assert any(step.has_switched and not step.speculates for step in steps[at:])


@given(at=st.integers(10, 60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drafting_that_pays_again_is_found_within_the_longest_interval(at: int) -> None:
    longest = 8 * 4 + 2
    steps = flown(lambda i, speculates: 1.0 if not speculates else 3.0 if i < at else 0.5, at + longest + 1)
    assert steps[-1].speculates or any(step.has_switched and step.speculates for step in steps[at:])


@given(costs=st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 3.0)), min_size=30, max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_that_resumes_from_its_records_decides_as_if_it_had_not_stopped(costs: list[tuple[float, float]]) -> None:
    steps = flown(lambda i, speculates: costs[i][speculates], 30)
    for stop in range(30):
        decision = decide(steps[:stop])
        taken = steps[stop]
        assert (decision.speculates, decision.is_probe, decision.has_switched) == (
            taken.speculates,
            taken.is_probe,
            taken.has_switched,
        )


def test_probes_and_turns_show_what_they_rest_on() -> None:
    steps = flown(lambda i, speculates: 2.0 if speculates else 1.0, 6)
    probe = Decision(speculates=False, is_probe=True, has_switched=False, own_ms=2.0, other_ms=1.0)
    assert decide(steps[:5]) == probe
    assert decide(steps) == Decision(speculates=False, is_probe=False, has_switched=True, own_ms=2.0, other_ms=1.0)


def test_of_an_even_number_of_costs_the_upper_one_in_the_middle_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "PATIENCE_STEPS", 4)
    costs = [99.0, 4.0, 1.0, 3.0, 2.0]
    steps = flown(lambda i, speculates: costs[i], 5)
    assert decide(steps).own_ms == 3.0
