"""What training waited for, by a clock that is set by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import Overlap
from slipstream.rewards.reward import RewardResult
from slipstream.train.metrics import Activity, StageClock, Stopwatch, common_s, total_s
from slipstream.train.pending import Scored
from slipstream.types import StageTimes


class Clock:
    """Starts at 0 s and stands still."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now() -> Clock:
    return Clock()


def batch(ended_s: float) -> Scored:
    """That the engines had at this time."""
    result = GenerationResult(groups=(), acceptance=None, generation_s=0.0)
    rewards = RewardResult(rewards=(), num_timeouts=0, num_crashes=0)
    return Scored(index=0, result=result, rewards=rewards, generated_s=ended_s)


def until(now: Clock, end_s: float, generated_s: float) -> Callable[[], Sequence[Scored]]:
    """A wait that ends at `end_s`, for what was generated at `generated_s`."""

    def wait() -> Sequence[Scored]:
        now.now = end_s
        return [batch(generated_s)]

    return wait


def step(
    now: Clock,
    *,
    exported_s: float = 10.0,
    generated_s: float,
    ended_s: float,
    delivery: tuple[float, float] | None = None,
    engine: tuple[float, float] | None = None,
) -> tuple[StageTimes, Overlap]:
    """One that begins at 10 s and waits for its rollouts; the ones before were there at 5 s."""
    watch = Stopwatch(now_s=now)
    now.now = 0.0
    watch.waited(StageClock(now), until(now, 5.0, 5.0))
    watch.overlap()
    for activity, span in ((watch.delivery, delivery), (watch.engine, engine)):
        if span is not None:
            now.now = span[0]
            with activity.busy():
                now.now = span[1]
    now.now = 10.0
    clock = StageClock(now)
    if exported_s > 10.0:
        with watch.exporting():
            now.now = exported_s
    watch.waited(clock, until(now, ended_s, generated_s))
    return clock.times(), watch.overlap()


@pytest.mark.parametrize(
    ("when", "times_s", "publish_s"),
    [
        # Rollouts that were there leave the whole export exposed.
        (
            {"exported_s": 12.0, "generated_s": 8.0, "ended_s": 12.0, "delivery": (5.0, 6.0), "engine": (6.0, 8.0)},
            (2.0, 0.0, 0.0),
            3.0,
        ),
        # An export while the engines generate costs nothing.
        ({"exported_s": 12.0, "generated_s": 15.0, "ended_s": 15.0, "engine": (5.0, 15.0)}, (0.0, 5.0, 0.0), 2.0),
        # What is left of an export when the rollouts are there is exposed, and scores come after.
        ({"exported_s": 14.0, "generated_s": 11.0, "ended_s": 17.0, "engine": (5.0, 11.0)}, (3.0, 1.0, 3.0), 4.0),
        # A wait for rollouts is first one for the weights that the engines took before.
        ({"generated_s": 13.0, "ended_s": 13.0, "delivery": (5.0, 6.0), "engine": (6.0, 13.0)}, (1.0, 2.0, 0.0), 1.0),
        # A wait that is shorter than the delivery is all publication.
        ({"generated_s": 10.5, "ended_s": 11.0, "delivery": (5.0, 9.0), "engine": (9.0, 10.5)}, (0.5, 0.0, 0.5), 4.0),
        # A delivery after the rollouts held nothing up.
        ({"generated_s": 12.0, "ended_s": 14.0, "delivery": (12.0, 13.0), "engine": (5.0, 12.0)}, (0.0, 2.0, 2.0), 1.0),
    ],
)
def test_a_wait_is_publication_generation_and_scores_one_after_the_other(
    now: Clock, when: dict[str, Any], times_s: tuple[float, float, float], publish_s: float
) -> None:
    times, overlap = step(now, **when)
    assert (times.prepare_s, times.generation_s, times.data_s) == times_s
    assert times.step_s == when["ended_s"] - 10.0
    assert (overlap.exposed_publish_s, overlap.exposed_score_s) == (times_s[0], times_s[2])
    assert overlap.publish_s == publish_s


def test_engines_that_stand_still_while_the_learner_writes_make_the_export_part_of_the_wait(now: Clock) -> None:
    """As in the first step, and without a lag."""
    watch = Stopwatch(now_s=now)
    clock = StageClock(now)
    with watch.exporting():
        now.now = 2.0
    with watch.delivery.busy():
        now.now = 3.0
    with watch.engine.busy():
        now.now = 7.0
    watch.waited(clock, until(now, 7.5, 7.0))
    times = clock.times()
    assert (times.prepare_s, times.generation_s, times.data_s, times.step_s) == (3.0, 4.0, 0.5, 7.5)
    assert watch.overlap().publish_s == 3.0


def test_a_wait_for_the_delivery_itself_is_publication_but_while_engines_still_generate(now: Clock) -> None:
    watch = Stopwatch(now_s=now)
    clock = StageClock(now)

    def wait() -> str:
        with watch.engine.busy():
            now.now = 2.0
        with watch.delivery.busy():
            now.now = 3.0
        return "taken"

    assert watch.delivered(clock, wait) == "taken"
    with watch.engine.busy():
        now.now = 3.5
    watch.waited(clock, until(now, 4.0, 4.0))  # that delivery is not counted again
    times = clock.times()
    assert (times.prepare_s, times.generation_s) == (1.0, 2.5 + 0.0)
    assert watch.overlap().exposed_publish_s == 1.0


def test_a_step_starts_from_nothing(now: Clock) -> None:
    watch = Stopwatch(num_regenerated=3, now_s=now)
    with watch.exporting():
        now.now = 1.0
    watch.waited(StageClock(now), until(now, 2.0, 0.5))
    assert (watch.overlap().num_regenerated, watch.overlap().num_regenerated) == (3, 0)
    now.now = 4.0
    last = watch.overlap()
    assert (last.publish_s, last.exposed_publish_s, last.score_s, last.exposed_score_s) == (0.0, 0.0, 0.0, 0.0)
    assert (last.engine_idle_fraction, last.learner_idle_fraction) == (1.0, 1.0)


def test_what_engines_scorer_and_learner_did_in_a_step_and_what_of_it_at_once(now: Clock) -> None:
    """Of 10 s: engines 0 to 6, of which they rested 2; the learner 4 to 9; the scorer 6 to 7. In the next 4 s none."""
    watch = Stopwatch(now_s=now)
    watch.num_awaited, watch.num_restarted = 5, 6
    engine, learner, score = (each.busy() for each in (watch.engine, watch.learner, watch.score))
    for until_s, change in (
        (0.0, engine.__enter__),
        (4.0, learner.__enter__),
        (6.0, lambda: engine.__exit__(None, None, None)),
        (6.0, score.__enter__),
        (7.0, lambda: score.__exit__(None, None, None)),
        (9.0, lambda: learner.__exit__(None, None, None)),
    ):
        now.now = until_s
        change()
    watch.engine.rested(2.0)
    now.now = 10.0

    assert watch.generated_s() == 6.0
    found = watch.overlap()
    assert (found.generation_s, found.hidden_s, found.score_s) == (6.0, 2.0, 1.0)
    assert (found.engine_idle_fraction, found.learner_idle_fraction) == (pytest.approx(0.6), pytest.approx(0.5))
    assert (found.num_awaited, found.num_restarted) == (5, 6)
    now.now = 14.0
    found = watch.overlap()
    assert watch.generated_s() == found.generation_s == found.hidden_s == found.score_s == 0.0
    assert (found.engine_idle_fraction, found.learner_idle_fraction) == (1.0, 1.0)
    assert (found.num_awaited, found.num_restarted, found.num_regenerated) == (0, 0, 0)


def test_a_step_that_took_no_time_was_idle_and_nothing_is_divided_by_it(now: Clock) -> None:
    found = Stopwatch(now_s=now).overlap()
    assert (found.engine_idle_fraction, found.learner_idle_fraction) == (1.0, 1.0)
    assert (found.num_awaited, found.num_restarted, found.num_regenerated) == (0, 0, 0)


def test_a_wait_for_nothing_is_no_generation(now: Clock) -> None:
    watch, clock = Stopwatch(now_s=now), StageClock(now)

    def wait() -> Sequence[Scored]:
        now.now = 2.0
        return []

    assert watch.waited(clock, wait) == []
    assert (clock.times().generation_s, clock.times().prepare_s, clock.times().data_s) == (0.0, 0.0, 2.0)


def test_an_export_counts_for_the_wait_after_it_alone(now: Clock) -> None:
    watch = Stopwatch(now_s=now)
    with watch.exporting():
        now.now = 2.0
    watch.waited(StageClock(now), until(now, 2.0, 0.0))
    clock = StageClock(now)
    watch.waited(clock, until(now, 5.0, 5.0))
    assert (clock.times().generation_s, clock.times().prepare_s) == (3.0, 0.0)


def test_the_latest_rollouts_of_a_wait_end_its_generation(now: Clock) -> None:
    watch, clock = Stopwatch(now_s=now), StageClock(now)

    def wait() -> Sequence[Scored]:
        now.now = 6.0
        return [batch(1.0), batch(4.0), batch(3.0)]

    watch.waited(clock, wait)
    assert (clock.times().generation_s, clock.times().data_s) == (4.0, 2.0)


def test_several_waits_of_one_step_add_up(now: Clock) -> None:
    """Two for scores, of 1 and 2 s; two for deliveries, of 3 and 4 s."""
    watch, clock = Stopwatch(now_s=now), StageClock(now)

    def delivery(end_s: float) -> Callable[[], None]:
        def wait() -> None:
            now.now = end_s

        return wait

    watch.waited(clock, until(now, 1.0, 0.0))
    watch.waited(clock, until(now, 3.0, 0.0))
    watch.delivered(clock, delivery(6.0))
    watch.delivered(clock, delivery(10.0))
    found = watch.overlap()
    assert (found.exposed_score_s, found.exposed_publish_s) == (3.0, 7.0)
    assert (clock.times().data_s, clock.times().prepare_s) == (3.0, 7.0)


def test_a_wait_for_the_delivery_while_engines_generate_all_the_time_exposes_nothing(now: Clock) -> None:
    watch, clock = Stopwatch(now_s=now), StageClock(now)

    def wait() -> None:
        with watch.engine.busy():
            now.now = 2.0

    watch.delivered(clock, wait)
    assert (clock.times().prepare_s, clock.times().generation_s) == (0.0, 2.0)
    assert watch.overlap().exposed_publish_s == 0.0


def test_shares_are_of_the_step_alone_however_short_it_is(now: Clock) -> None:
    """It begins at 10 s and takes 0.5 s, of which engines work 0.25."""
    watch = Stopwatch(now_s=now)
    now.now = 10.0
    watch.overlap()
    with watch.engine.busy():
        now.now = 10.25
    now.now = 10.5
    assert watch.overlap().engine_idle_fraction == 0.5


def test_work_is_cut_at_the_ends_of_a_step_and_counted_in_both() -> None:
    clock = Clock()
    activity = Activity(clock)
    clock.now = 1.0
    with activity.busy():
        clock.now = 3.0
        assert activity.between(0.0, 2.0) == [(1.0, 2.0)]  # what goes on is included
        assert activity.between(0.0, 1.0) == []
        activity.forget(2.0)
        clock.now = 5.0
    with activity.busy():
        clock.now = 6.0
    assert activity.between(2.0, 10.0) == [(2.0, 5.0), (5.0, 6.0)]
    activity.forget(5.5)
    assert activity.between(0.0, 10.0) == [(5.0, 6.0)]


def test_a_rest_is_taken_once() -> None:
    activity = Activity()
    activity.rested(0.5)
    activity.rested(0.25)
    assert (activity.take_rest(), activity.take_rest()) == (0.75, 0.0)


def test_what_two_did_at_the_same_time_is_counted_once() -> None:
    ours, theirs = [(0.0, 2.0), (3.0, 6.0)], [(1.0, 4.0), (5.0, 9.0)]
    assert (total_s(ours), total_s(theirs)) == (5.0, 7.0)
    assert common_s(ours, theirs) == 3.0  # 1-2, 3-4 and 5-6
    assert common_s(ours, []) == 0.0


def test_work_that_fails_ends_and_counts() -> None:
    clock = Clock()
    activity = Activity(clock)
    with pytest.raises(ZeroDivisionError), activity.busy():
        clock.now = 2.0
        raise ZeroDivisionError
    clock.now = 3.0
    assert activity.between(0.0, 10.0) == [(0.0, 2.0)]


def test_work_that_ended_is_forgotten_at_its_end_and_nothing_is_seen_of_it_from_there_on() -> None:
    clock = Clock()
    activity = Activity(clock)
    with activity.busy():
        clock.now = 2.0
    assert activity.between(2.0, 3.0) == activity.between(-1.0, 0.0) == []
    activity.forget(1.5)
    assert activity.between(0.0, 3.0) == [(0.0, 2.0)]
    activity.forget(2.0)
    assert activity.between(0.0, 3.0) == []


def test_a_clock_that_is_not_given_is_that_of_the_process() -> None:
    activity = Activity()
    start_s = time.perf_counter()
    with activity.busy():
        pass
    (span,) = activity.between(start_s, time.perf_counter())
    assert start_s <= span[0] < span[1]


def test_the_turn_of_another_arm_is_no_part_of_a_step() -> None:
    now = Clock()
    watch = Stopwatch(now_s=now)
    now.now = 100.0
    watch.restart()
    with watch.learner.busy():
        now.now = 103.0
    now.now = 104.0
    assert watch.overlap().learner_idle_fraction == 0.25
