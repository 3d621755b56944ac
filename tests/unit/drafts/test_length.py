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
from slipstream.drafts import length as lengths
from slipstream.drafts.length import SWITCHED_OFF, Decision, DraftLength, Round, Sweep, TuningConfig
from slipstream.drafts.methods import DraftSampling
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engines, GenerationResult, RunningTime
from slipstream.records.stages import RunningPoint, SweepPoint, TuningRecord
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
        self.cached: set[str] = set()

    def forget(self) -> None:
        self.cached.clear()

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        batch = len(prompts) * group_size
        self.calls.append((self.k, batch))
        self.asked.append([prompt.id for prompt in prompts])
        self.settings.append((sampling, group_size, seed))
        rollouts = (rollout((7,) * (4 + self.k), -1.0),) * group_size
        groups = tuple(RolloutGroup(prompt=prompt, rollouts=rollouts) for prompt in prompts)
        acceptance = accepted(10, 10, *(0,) * (self.k - 1)) if self.k else None
        return GenerationResult(groups=groups, acceptance=acceptance, generation_s=self.seconds[self.k, batch])


class ScriptedEngine(TimedEngine):
    """An engine whose generations take these seconds, one after the other."""

    def __init__(self, k: int, rounds: Sequence[float], calls: list[tuple[int, int]] | None = None) -> None:
        super().__init__(k, defaultdict(float), [] if calls is None else calls)
        self.rounds = iter(rounds)

    def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
        return replace(super().generate(prompts, **how), generation_s=next(self.rounds))


SECONDS = {(0, 2): 4.0, (0, 8): 6.0, (1, 2): 3.0, (1, 8): 8.0, (3, 2): 2.0, (3, 8): 9.0}
CONFIG = TuningConfig(candidate_ks=(0, 1, 3), batch_sizes=(2, 8), num_repeats=2)


def swept(engine: Callable[[int], TimedEngine], config: TuningConfig = CONFIG, into: Any = None, **how: Any) -> Sweep:
    """The sweep of engines that `engine` makes of a k, which are kept in `into`."""

    @contextmanager
    def start(k: int) -> Iterator[TimedEngine]:
        made = engine(k)
        if into is not None:
            into.append(made)
        yield made

    return lengths.sweep(start, **{"prompts": PROMPTS, "config": config, "sampling": SAMPLING, "seed": 0, **how})


def timed(seconds: dict[tuple[int, int], float] = SECONDS, calls: Any = None) -> Callable[[int], TimedEngine]:
    return lambda k: TimedEngine(k, seconds, [] if calls is None else calls)


def test_every_k_is_measured_in_turn_with_the_baseline_and_with_all_that_fit() -> None:
    calls: list[tuple[int, int]] = []
    points = swept(timed(calls=calls)).points
    assert [(p.k, p.batch) for p in points] == [(0, 2), (0, 8), (1, 2), (1, 8), (3, 2), (3, 8)]
    assert calls[-4:] == [(0, 8), (3, 8), (3, 8), (0, 8)]
    calls.clear()
    points = swept(timed(calls=calls), replace(CONFIG, max_live_engines=3)).points
    assert [k for k, batch in calls if batch == 2] == [0, 1, 3, 1, 3, 0]  # each round starts with another
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
    scheduled = swept(timed(seconds), config, switch=lambda engine, k: None)
    assert sorted({point.k for point in scheduled.points}) == list(ks)  # a schedule is made of every length


def test_no_engine_gains_by_prompts_that_it_met_beside_engines_before() -> None:
    class CachingEngine(TimedEngine):
        """A second for each prompt that it does not know; drafts gain nothing."""

        def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
            new = {prompt.id for prompt in prompts} - self.cached
            self.cached |= new
            return replace(super().generate(prompts, **how), generation_s=1.0 + len(new))

    prompts = [replace(PROMPTS[0], id=str(i)) for i in range(24)]
    config = replace(CONFIG, candidate_ks=(0, 1, 2, 3))
    for switch in (None, lambda engine, k: None):
        found = swept(lambda k: CachingEngine(k, defaultdict(float), []), config, prompts=prompts, switch=switch)
        assert {point.speedup for point in found.points} == {1.0}
        assert all(len({result.generation_s for result in each.values()}) == 1 for each in found.rounds)


def test_drafting_that_is_switched_off_is_measured_in_the_engine_of_the_longest_drafts() -> None:
    calls: list[tuple[int, int]] = []
    switched: list[tuple[int, int, int]] = []  # whose length, to what, after how many generations
    engines: list[TimedEngine] = []

    def switch(engine: Engines, k: int) -> None:
        assert isinstance(engine, TimedEngine)
        switched.append((engine.k, k, len(calls)))

    found = swept(timed(calls=calls), into=engines, switch=switch)

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


def test_points_are_told_once_the_rounds_of_a_batch_are_done() -> None:
    """Each engine warms up once; then it and the baseline generate in two rounds of each batch."""
    calls: list[tuple[int, int]] = []
    told: list[tuple[int, int]] = []
    swept(timed(calls=calls), on_points=lambda points: told.extend((point.k, len(calls)) for point in points))
    assert told == [(1, 6), (1, 10), (3, 15), (3, 19)]


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

    with pytest.raises(RuntimeError, match="no memory left"):
        lengths.sweep(start, PROMPTS, config=replace(CONFIG, max_live_engines=3), sampling=SAMPLING, seed=0)
    assert ended == [1, 0]


def test_every_engine_is_asked_alike_for_groups_and_every_repeat_has_other_prompts_and_a_seed_of_its_own() -> None:
    engines: list[TimedEngine] = []
    points = swept(timed(), into=engines, prompts=PROMPTS[:6], group_size=2, seed=5).points
    assert [p.batch for p in points[:2]] == [2, 8]
    warm_up, *measured = engines[1].asked  # k = 1
    assert warm_up == ["0", "1", "2", "3"]
    assert measured == [["0"], ["1"], ["0", "1", "2", "3"], ["4", "5", "0", "1"]]
    first, rounds = (SAMPLING, 2, 0), [(SAMPLING, 2, 5), (SAMPLING, 2, 6)]
    baseline, *speculating = engines
    assert baseline.settings == [first, *rounds * 4]  # two batches beside k=1, two beside k=3
    assert [engine.settings for engine in speculating] == [[first, *rounds * 2]] * 2


def test_a_k_is_judged_by_the_baseline_of_its_own_round_and_told_as_soon_as_it_is_known() -> None:
    """Every round speaks for k=1, by 2, 3 and 4; of the medians of the rounds' seconds one would say 8 / 3.

    Of the seconds 3, 3 and 2 p10 is at rank 0.2 and p90 at rank 1.8.
    """
    seconds = {0: [1.0, 6.0, 9.0, 8.0], 1: [1.0, 3.0, 3.0, 2.0]}  # the first call warms up
    told: list[SweepPoint] = []
    config = TuningConfig(candidate_ks=(0, 1), batch_sizes=(8,), num_repeats=3)
    baseline, point = swept(lambda k: ScriptedEngine(k, seconds[k]), config, on_points=told.extend).points
    assert told == [point]  # the baseline's is known last
    assert point == SweepPoint(
        k=1,
        batch=8,
        generation_s=3.0,
        generation_p10_s=2.2,
        generation_p90_s=3.0,
        num_repeats=3,
        autoregressive_s=8.0,
        speedup=3.0,
        mean_acceptance_length=2.0,
        rate_by_position=(1.0,),
        mean_response_tokens=5.0,
        autoregressive_response_tokens=4.0,
        longest_response_tokens=5.0,
        autoregressive_longest_tokens=4.0,
    )
    assert (baseline.k, baseline.num_repeats, baseline.generation_s, baseline.autoregressive_s) == (0, 3, 8.0, 8.0)
    assert (baseline.speedup, baseline.mean_acceptance_length, baseline.rate_by_position) == (1.0, 1.0, ())


def test_the_fastest_k_of_the_nearest_batch_wins_if_it_is_faster_and_not_only_as_fast() -> None:
    points = swept(timed()).points
    record = lengths.choose(points, config=CONFIG, batch=3)
    assert (record.chosen_k, record.points) == (3, points)
    assert record.reason == "k=3 is fastest at batch 2: 2.00x autoregressive (4.00 -> 2.00 s, AL 2.00)"
    assert lengths.choose(points, config=CONFIG, batch=5).chosen_k == 3  # as near to 8, but 2 is smaller
    equal = [replace(point, speedup=min(point.speedup, 1.0)) for point in points]
    record = lengths.choose(equal, config=CONFIG, batch=2)
    assert (record.chosen_k, record.reason) == (0, "k=0 wins at batch 2: no draft length is faster")
    assert [entry.num_speculative_tokens for entry in record.schedule] == [0]


def test_a_sweep_keeps_every_rounds_steps_and_the_schedule_is_made_from_them() -> None:
    """k=1 is chosen for whole generations; the steps say that a rollout alone wants k=3."""
    seconds = {0: 4.0, 1: 2.0, 3: 2.2}
    steps = {0: (1750, 1750), 1: (750, 750), 3: (350, 1250)}  # ms of one rollout alone and of two

    class SteppingEngine(TimedEngine):
        def generate(self, prompts: Sequence[Prompt], **how: Any) -> GenerationResult:
            return replace(super().generate(prompts, **how), running=decoded(5, *steps[self.k]).running)

    config = replace(CONFIG, max_live_engines=3)
    found = swept(lambda k: SteppingEngine(k, {(k, batch): seconds[k] for batch in (2, 8)}, []), config)
    assert len(found.rounds) == 4  # two of each batch size
    assert all(sorted(each) == [0, 1, 3] for each in found.rounds)

    record = lengths.choose(found.points, config=config, batch=8, rounds=found.rounds)
    assert record.chosen_k == 1
    assert record.schedule == (entry(1, 1, 3), entry(2, 8, 1))
    assert record.schedule_gain == pytest.approx(2.0 / (0.35 + 0.75 + 0.6))  # 0.6 s of prompts with k=3
    assert record.running == lengths.running_points(found.rounds, chosen_k=1, largest=8)
    three = replace(config, batch_sizes=(2, 4, 8))
    assert lengths.choose(found.points, config=three, batch=8, rounds=found.rounds).schedule == record.schedule


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
def test_a_sweep_outside_its_bounds_is_refused(refusal: Callable[..., str], values: Any, message: str) -> None:
    assert refusal(TuningConfig, **values) == message


def test_a_batch_that_the_prompts_do_not_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_sizes must be at most the 8 rollouts of the prompts, got 16"):
        swept(lambda k: pytest.fail("no engine may start"), replace(CONFIG, batch_sizes=(16,)))


def time(num_running: int, *, steps: int, tokens: int, ms: float) -> RunningTime:
    return RunningTime(num_running=num_running, num_steps=steps, num_tokens=tokens, elapsed_s=ms / 1e3)


def entry(start: int, end: int, k: int) -> ScheduleEntry:
    return ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k)


def decoded(steps: int, *ms: float, prompts_ms: float = 0.0) -> GenerationResult:
    """Steps with one rollout, two, ..., in each of which every rollout gains 10 tokens; and others of prompts."""
    return generation(
        *(time(num, steps=steps, tokens=10 * num, ms=each) for num, each in enumerate(ms, 1)), prompts_ms=prompts_ms
    )


def generation(*running: RunningTime, prompts_ms: float = 0.0) -> GenerationResult:
    seconds = sum(each.elapsed_s for each in running) + prompts_ms / 1e3
    return GenerationResult(groups=(), acceptance=None, generation_s=seconds, running=running)


# Ten steps of a rollout alone and ten of two without a draft; four and four with one of 2.
ROUND: Round = {0: decoded(10, 100, 100), 2: decoded(4, 50, 125)}


def test_the_cost_of_a_k_is_the_time_in_which_every_running_rollout_gains_a_token() -> None:
    points = lengths.running_points([ROUND], chosen_k=2, largest=2)
    assert [(p.k, p.batch_from, p.batch_to) for p in points] == [(0, 1, 1), (2, 1, 1), (0, 2, 2), (2, 2, 2)]
    # 10 tokens of a rollout in 100, 50, 100 and 125 ms.
    assert [p.token_ms for p in points] == pytest.approx([10.0, 5.0, 10.0, 12.5])
    assert [p.tokens_per_step for p in points] == [1.0, 2.5, 1.0, 2.5]
    assert [p.speedup for p in points] == pytest.approx([1.0, 2.0, 1.0, 0.8])
    assert [p.gain for p in points] == pytest.approx([0.5, 1.0, 1.25, 1.0])
    assert [p.num_rounds for p in points] == [1, 1, 1, 1]


def test_running_batches_are_taken_together_in_ranges_that_double() -> None:
    points = lengths.running_points([{0: decoded(1, *range(1, 13))}], chosen_k=0, largest=12)
    assert [(p.batch_from, p.batch_to) for p in points] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 12)]
    # 9 + 10 + 11 + 12 ms for forty tokens a rollout.
    assert (points[-1].token_ms, points[-1].num_steps) == (pytest.approx(42 / 40), 4)


# k=5 is twice as fast as k=2 for one rollout alone, and slower for two.
LONG: Round = {**ROUND, 5: decoded(2, 25, 250)}


def switched_off(*ms: float, prompts_ms: float | None = None) -> Round:
    """`ROUND`, with an engine that drafts nothing although it has a draft; or with prompts, 100 ms without a draft."""
    off: Round = {**ROUND, SWITCHED_OFF: decoded(10, *ms)}
    if prompts_ms is None:
        return off
    return {**off, 0: decoded(10, 100, 100, prompts_ms=100), 2: decoded(4, 50, 125, prompts_ms=prompts_ms)}


OTHER: Round = {0: decoded(10, 200), 5: decoded(2, 50)}  # k=5 is 4 times as fast as k=0, in `ROUND` k=2 twice
ALONE: Round = {5: decoded(2, 1)}
DENIED, REFUTED = ({**LONG, 5: decoded(2, ms, 250)} for ms in (55, 220))


RANGES: list[Round] = [{2: decoded(5, 50, 50, 80, 80), 1: decoded(5, 100, 100, 40, 40)}] * 2
NEVER_OFF: list[Round] = [{SWITCHED_OFF: decoded(10, 120), 2: decoded(4, 50), 0: ROUND[0]}] * 2
UNSURE = [switched_off(120, 130), switched_off(120, 70)]
FIVE_ALONE, TWO, TWO_ALONE, NONE = "1-1: 5, 2-2: 2", "1-2: 2", "1-1: 2, 2-2: 0", "1-2: 0"


def table_of(rounds: Sequence[Round], chosen_k: int, largest: int = 2, **least: float) -> tuple[str, float]:
    """The schedule and its gain."""
    points = lengths.running_points(rounds, chosen_k=chosen_k, largest=largest)
    table = lengths.schedule(points, rounds, chosen_k=chosen_k, largest=largest, **least)
    return lengths.described(table), lengths.expected_gain(points, table, rounds, chosen_k=chosen_k)


@pytest.mark.parametrize(
    ("rounds", "chosen_k", "expected", "gain"),
    [
        # A k that is faster at a running batch takes it from the chosen one: of 175 ms the 50 for one alone become 25.
        ([LONG] * 2, 2, FIVE_ALONE, 175 / 150),
        # One round is no evidence; of gains of 2, 2 and 50 / 55 the geometric mean is 1.54, of 2 and 50 / 220 0.67.
        ([LONG], 2, TWO, 1.0),
        ([LONG, LONG, DENIED], 2, FIVE_ALONE, None),
        ([LONG, REFUTED], 2, TWO, 1.0),
        # The speed of an engine without a draft gives length 0 no range: there is no engine that drops its draft.
        ([ROUND] * 2, 2, TWO, 1.0),
        ([LONG] * 2, 0, NONE, 1.0),
        # Drafting is switched off where an engine with a draft was faster so.
        ([switched_off(120, 110)] * 2, 2, TWO_ALONE, 175 / 160),
        ([switched_off(120, 126)] * 2, 2, TWO, 1.0),
        # Where no k pays throughout one may still in the tail, if that outweighs the draft's first pass. At 130 ms
        # switching off is dearer than k=2 for two: a table is k=2 throughout, which is no table.
        ([switched_off(120, 110)] * 2, 0, TWO_ALONE, 200 / 160),
        ([switched_off(120, 130)] * 2, 0, NONE, 1.0),
        # There each range goes to the fastest, however unsure: two rollouts take 130 ms or 70, with k=2 125 both times.
        (UNSURE, 0, TWO_ALONE, None),
        (UNSURE, 2, TWO_ALONE, None),
        (UNSURE[1:], 0, NONE, 1.0),
        # Where length 0 was not measured in an engine with a draft it takes as long as without: 100 ms become 50.
        (NEVER_OFF, 0, TWO_ALONE, 200 / 150),
        # A table pays for the prompts in its own engine: 200 ms and 100 without a draft, by the table 150 and these.
        ([switched_off(120, 100, prompts_ms=100)] * 2, 0, TWO_ALONE, 300 / 250),
        ([switched_off(120, 100, prompts_ms=144)] * 2, 0, NONE, 1.0),
        # A k that never met the chosen one is compared with it through k=0, one that met neither takes nothing.
        ([ROUND, OTHER, ROUND, OTHER], 2, FIVE_ALONE, None),
        ([ROUND, OTHER], 2, TWO, 1.0),
        ([ROUND, ROUND, ALONE, ALONE], 2, TWO, 1.0),
        ([], 2, TWO, 1.0),
    ],
)
def test_each_range_goes_to_the_k_that_is_surely_faster_there(
    rounds: list[Round], chosen_k: int, expected: str, gain: float | None
) -> None:
    table, found = table_of(rounds, chosen_k)
    assert table == expected
    assert gain is None or found == pytest.approx(gain)


def test_a_range_of_several_batches_changes_hands_as_a_whole_and_a_table_that_gains_too_little_is_none() -> None:
    """k=1 is twice as fast as k=2 for three and four: of 50 + 50 + 80 + 80 ms the last two halve."""
    assert table_of(RANGES, 2, largest=4) == ("1-2: 2, 3-4: 1", pytest.approx(260 / 180))
    _, gain = table_of([LONG] * 2, 2)
    assert [table_of([LONG] * 2, 2, min_gain=least)[0] for least in (gain, 1.17)] == [FIVE_ALONE, TWO]
    assert table_of([switched_off(120, 110)] * 2, 0, min_gain=1.26)[0] == NONE
    as_fast_for_two: Round = {**LONG, 5: decoded(2, 25, 125)}
    assert table_of([as_fast_for_two] * 2, 2, min_gain=1.0)[0] == FIVE_ALONE
    late = [switched_off(120, 100, prompts_ms=300)] * 2
    points = lengths.running_points(late, chosen_k=0, largest=2)
    mixed = (entry(1, 1, 2), entry(2, 2, 0))
    assert lengths.expected_gain(points, mixed, late, chosen_k=0) == pytest.approx(300 / 450)
    assert lengths.expected_gain((), lengths.constant(3), (), chosen_k=3) == 1.0


def test_the_points_of_a_k_say_how_often_it_was_as_fast() -> None:
    def points_of(rounds: Sequence[Round], k: int) -> list[RunningPoint]:
        return [point for point in lengths.running_points(rounds, chosen_k=2, largest=2) if point.k == k]

    off = [point for point in points_of([switched_off(120, 110)] * 2, 0) if point.is_switched_off]
    assert [point.batch_from for point in off] == [1, 2]
    assert [point.gain for point in off] == pytest.approx([50 / 120, 125 / 110])
    assert [point.speedup for point in off] == pytest.approx([100 / 120, 100 / 110])
    for rounds, gains in (
        ([LONG, LONG, DENIED], ((2 * 2 * 50 / 55) ** (1 / 3), 50 / 55)),
        ([ROUND, OTHER, ROUND, OTHER], (2.0, 2.0)),
        ([ROUND, ROUND, ALONE, ALONE], (1.0, 0.0)),
    ):
        point = points_of(rounds, 5)[0]
        assert (point.gain, point.gain_low) == pytest.approx(gains)


def test_rounds_without_k_0_or_without_the_chosen_k_say_nothing_of_it() -> None:
    apart: list[Round] = [{2: ROUND[2]}, {5: LONG[5]}]
    points = lengths.running_points(apart, chosen_k=2, largest=1)
    assert [(p.k, p.speedup, p.gain, p.gain_low) for p in points] == [(2, None, 1.0, 0.0), (5, None, 1.0, 0.0)]
    points = lengths.running_points([{0: ROUND[0], 5: LONG[5]}], chosen_k=2, largest=1)
    assert [(p.k, p.speedup, p.gain) for p in points] == [(0, 1.0, 1.0), (5, pytest.approx(4.0), 1.0)]
    only_two = generation(time(2, steps=1, tokens=2, ms=1))
    points = lengths.running_points([{0: only_two, 2: ROUND[2]}], chosen_k=2, largest=2)
    assert [point.speedup is None for point in points if point.k == 2] == [True, False]


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
        k: generation(*(time(num, steps=1, tokens=num, ms=ms) for (of, num), ms in sorted(costs.items()) if of == k))
        for k in (SWITCHED_OFF, 0, 2, 7)
    }
    rounds = [by_k, by_k]
    points = lengths.running_points(rounds, chosen_k=chosen_k, largest=largest)
    table = lengths.schedule(points, rounds, chosen_k=chosen_k, largest=largest, min_gain=1.0)
    covered = [num for each in table for num in range(each.batch_from, each.batch_to + 1)]
    assert covered == list(range(1, largest + 1))
    assert all(a.num_speculative_tokens != b.num_speculative_tokens for a, b in pairwise(table))
    assert lengths.expected_gain(points, table, rounds, chosen_k=chosen_k) >= 1.0 - 1e-9


def _record(*table: ScheduleEntry, chosen_k: int = 3) -> TuningRecord:
    return TuningRecord(chosen_k=chosen_k, reason="told so", points=(), schedule=table)


def test_a_table_of_several_is_taken_only_where_it_is_asked_for_and_a_table_of_one_k_is_none() -> None:
    record = _record(entry(1, 8, 7), entry(9, 48, 2))
    length = lengths.length_of(record, by_batch=True)
    assert length == DraftLength(num_speculative_tokens=7, schedule=record.schedule)
    assert (length.label, lengths.described(length.schedule)) == ("by_batch", "1-8: 7, 9-48: 2")
    for length in (
        lengths.length_of(record, by_batch=False),
        lengths.length_of(_record(entry(1, 48, 3)), by_batch=True),
    ):
        assert (length, length.label) == (DraftLength(num_speculative_tokens=3), "3")


def _compared(greedy: list[float], calls: Any = None, into: Any = None) -> TuningRecord:
    """Three rounds at a batch of 8, the nearest to 7, in which probabilistic drafts take 2, 4 and 6 seconds.

    Engines of greedy drafts are told from others by two tokens instead of one.
    """
    seconds = {DraftSampling.PROBABILISTIC: [9.0, 2.0, 4.0, 6.0], DraftSampling.GREEDY: [9.0, *greedy]}

    @contextmanager
    def start(kind: DraftSampling) -> Iterator[TimedEngine]:
        made = ScriptedEngine(1 + (kind is DraftSampling.GREEDY), seconds[kind], calls)
        if into is not None:
            into.append(made)
        yield made

    config = replace(CONFIG, num_repeats=3)
    points = lengths.compare(start, PROMPTS, config=config, sampling=SAMPLING, seed=5, batch=7, group_size=2)
    assert [(point.batch, point.num_repeats, point.mean_acceptance_length) for point in points] == [(8, 3, 2.0)] * 2
    return lengths.with_faster_drafts(_record(), points)


def test_both_kinds_of_drafts_generate_in_turn_and_the_median_of_their_rounds_decides() -> None:
    calls: list[tuple[int, int]] = []
    engines: list[TimedEngine] = []
    record = _compared([1.0, 8.0, 5.0], calls, engines)  # ratios 2.0, 0.5 and 1.2
    assert calls == [(k, 8) for k in (1, 2, 1, 2, 2, 1, 1, 2)]
    assert [[seed for *_, seed in engine.settings] for engine in engines] == [[0, 5, 6, 7]] * 2
    assert [(point.sampling, point.gain) for point in record.samplings] == [("probabilistic", 1.0), ("greedy", 1.2)]
    assert record.sampling == "greedy"
    faster = "greedy ones generate 1.20x as fast as probabilistic ones (4.00 -> 5.00 s)"
    assert record.reason == f"told so; greedy drafts: {faster}"
    assert lengths.length_of(record, by_batch=False).sampling is DraftSampling.GREEDY
    table = (entry(1, 8, 7), entry(9, 48, 2))
    length = lengths.length_of(replace(record, schedule=table), by_batch=True)
    assert length == DraftLength(num_speculative_tokens=7, schedule=table, sampling=DraftSampling.GREEDY)


@pytest.mark.parametrize("greedy", [[2.0, 4.0, 6.0], [1.0, 8.0, 7.0]])
def test_greedy_drafts_that_are_no_faster_are_not_taken(greedy: list[float]) -> None:
    record = _compared(greedy)
    assert (record.sampling, len(record.samplings)) == ("probabilistic", 2)


Cost = Callable[[int, bool], float]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes after four steps."""
    monkeypatch.setattr(lengths, "_PROBE_EVERY_STEPS", 4)


def flown(cost: Cost, num_steps: int) -> list[AutopilotStep]:
    """Steps of a run whose step i costs `cost(i, speculates)`."""
    steps: list[AutopilotStep] = []
    for index in range(num_steps):
        flags = taken(lengths.decide(steps))
        steps.append(AutopilotStep(token_ms=cost(index, flags["speculates"]), **flags))
    return steps


def taken(step: Decision | AutopilotStep) -> dict[str, bool]:
    return {name: getattr(step, name) for name in ("speculates", "is_probe", "has_switched")}


def switches(steps: list[AutopilotStep]) -> list[int]:
    return [index for index, step in enumerate(steps) if step.has_switched]


def pattern(steps: list[AutopilotStep]) -> str:
    """S and P speculate, s and p do not; p and P are probes."""
    letters = {(True, False): "S", (True, True): "P", (False, False): "s", (False, True): "p"}
    return "".join(letters[step.speculates, step.is_probe] for step in steps)


def at(*costs: tuple[int, float], off: float = 1.0) -> Cost:
    """Drafting costs each of these from its step on, and `off` is what a step without drafts costs."""

    def cost(index: int, speculates: bool) -> float:
        return [ms for start, ms in costs if index >= start][-1] if speculates else off

    return cost


# `_often` does the same for all examples.
PROPERTY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PAYING = "SSSSp" + "SSSSSSSp" + "S" * 15 + "p" + "S" * 11


@pytest.mark.parametrize(
    ("cost", "expected", "switched"),
    [
        # The first step warms up, three say what drafting costs, then k = 0 is looked at; after 8 and 16 steps again.
        (at((0, 1.0), off=2.0), PAYING, []),
        # On: 4 steps, two probes, off. Then a probe of drafting after 4 steps, 8, ...
        (at((0, 2.0)), "SSSSpp" + "ssssP" + "sssssssP" + "sssss", [6]),
        (at((0, 2.0), (8, 0.5)), "SSSSpp" + "ssss" + "PP" + "SSSSp" + "SSS", [6, 12]),
        # Steps 20 to 22 lose; 23 and 24 are probes that agree, 25 is off.
        (at((0, 0.5), (20, 3.0)), PAYING[:20] + "SSSpps", [25]),
        (at((0, 1.0), (8, 9.0), (9, 1.0), off=2.0), PAYING, []),
        # Drafting costs 1, then 3 from step 9 on: beside the probe of step 12 that of step 4 is too old, so 13 is one.
        (at((0, 1.0), (9, 3.0), off=2.0), "SSSSp" + "SSSSSSS" + "pp" + "ss", [14]),
    ],
    ids=[
        "where it pays it is probed ever more rarely and never left",
        "where it loses from the start it is left after two probes that agree",
        "a draft that recovers is taken up again",
        "a collapse is probed at once after the steps that lost",
        "one slow step turns nothing",
        "probes that are older than the steps which lose turn nothing",
    ],
)
def test_the_autopilot_probes_and_switches(cost: Cost, expected: str, switched: list[int]) -> None:
    steps = flown(cost, len(expected))
    assert pattern(steps) == expected
    assert switches(steps) == switched


def test_the_autopilot_probes_at_the_steps_that_the_docs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # `_often`
    probes = [step for step, letter in enumerate(pattern(flown(at((0, 1.0), off=2.0), 182)), start=1) if letter == "p"]
    assert probes == [5, 5 + 16, 5 + 16 + 32, 5 + 16 + 32 + 64, 5 + 16 + 32 + 64 + 64]
    left = pattern(flown(at((0, 2.0)), 63))
    assert left == "SSSSpp" + "s" * 8 + "P" + "s" * 15 + "P" + "s" * 31 + "P"


def test_a_decision_shows_the_median_of_the_last_steps_and_the_last_cost_of_the_other_way() -> None:
    """The first step, which pays for allocations, counts for nothing."""

    def flying(*costs: float) -> list[AutopilotStep]:
        return flown(lambda index, speculates: costs[index] if speculates else 5.0, len(costs))

    assert lengths.decide([]) == lengths.decide(flying(99.0, 8.0, 1.0)) == Decision(speculates=True)
    assert lengths.decide(flying(99.0, 8.0, 1.0, 3.0)) == Decision(speculates=False, is_probe=True, own_ms=3.0)
    assert lengths.decide(flying(99.0, 8.0, 1.0, 3.0, 0.0, 2.0)) == Decision(speculates=True, own_ms=2.0, other_ms=5.0)
    assert lengths.decide(flown(at((0, 99.0), (1, 1.0), off=2.0), 4)).own_ms == 1.0
    turning = flown(at((0, 2.0)), 6)
    assert lengths.decide(turning[:5]) == Decision(speculates=False, is_probe=True, own_ms=2.0, other_ms=1.0)
    assert lengths.decide(turning) == Decision(speculates=False, has_switched=True, own_ms=2.0, other_ms=1.0)


def test_a_way_that_costs_more_by_the_margin_and_nothing_else_has_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter is exact in binary."""
    monkeypatch.setattr(lengths, "_MARGIN", 0.25)
    assert [switches(flown(at((0, cost), off=4.0), 12)) for cost in (5.0, 5.1)] == [[], [6]]


@given(start=st.integers(0, 40), before=st.floats(0.2, 1.0), after=st.floats(1.2, 10.0))
@PROPERTY
def test_after_a_collapse_as_many_steps_draft_as_patience_allows(start: int, before: float, after: float) -> None:
    steps = flown(at((0, before), (start, after)), 80)[start:]
    warm_up = 1 if start == 0 else 0
    assert sum(step.speculates and not step.is_probe for step in steps) <= lengths.PATIENCE_STEPS + warm_up
    assert any(step.has_switched and not step.speculates for step in steps)


@given(start=st.integers(10, 60))
@PROPERTY
def test_drafting_that_pays_again_is_found_within_the_longest_interval(start: int) -> None:
    longest = 8 * 4 + 2
    steps = flown(at((0, 3.0), (start, 0.5)), start + longest + 1)
    assert steps[-1].speculates or any(step.has_switched and step.speculates for step in steps[start:])
