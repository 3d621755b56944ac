"""A step under its MLflow names, in words, and what training waited for by a clock that is set by hand.

Every number of a step has another value, so that none can stand for another.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from slipstream.records.steps import (
    AutopilotStep,
    DraftUpdate,
    DynamicSampling,
    EvaluationRecord,
    LagStats,
    MachineUse,
    Overlap,
)
from slipstream.tracking.config import check_metrics
from slipstream.train.machine_use import Counters
from slipstream.train.metrics import Activity, StageClock, Stopwatch, common, metrics_of, step_line, total_s
from slipstream.types import StageTimes
from tests.unit.refusals import rows
from tests.unit.sampled import DECISION, accepted, overlapping
from tests.unit.train.world import NO_TIMES, STEP, scored

ACCEPTANCE = accepted(10, 8, 4)
SAMPLED = DynamicSampling(
    num_batches=3, num_groups=19, num_with_signal=5, num_filled=4, num_surplus=2, extra_generation_s=1.5
)
UPDATE = DraftUpdate(loss=1.25, num_updates=2, elapsed_s=0.5)


def named(prefix: str, **values: Any) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


METRICS = {
    **named("time", data_s=1.0, prepare_s=2.0, generation_s=4.0, logprob_s=8.0, train_s=16.0, step_s=32.0),
    **named("rollout", response_tokens=100, tokens_per_s=25.0, longest_response_tokens=7, truncated=3),  # 100 in 4 s
    **named("rollout", engine_restarts=12, preemptions=14, engine_idle_fraction=0.25),
    **named("train", reward=0.125, reward_timeouts=5, reward_crashes=6, reward_failures=8),
    **named("reward", length=2.5),
    **named("train", zero_signal_groups=7, filtered_rollouts=15, policy_version=10),
    **named("train", loss=0.1, grad_norm=0.2, kl=0.3, clip_fraction=0.4, learning_rate=0.5),
    **named("train", mismatch_kl=0.6, mismatch_k3=0.7, mismatch_mean=0.8, mismatch_max=0.9),
    **named("train", mismatch_outside_fraction=0.95),
    **named("refit", num_checked_tensors=11, check_s=0.15),
}
EVALUATION = EvaluationRecord(
    policy="speculative",
    num_problems=2,
    k=4,
    avg_at_k=0.25,
    maj_at_k=0.5,
    ci95=(0.1, 0.4),
    truncated_fraction=0.125,
    num_timeouts=1,
    prompt_hash="abc",
    correct_by_problem=(0, 2),
)
USE = MachineUse(load=1.5, other_cpu_fraction=0.34, steal_fraction=None, memory_pressure_fraction=0.02, cpu_mhz=2600.0)
OF_MACHINE = named("machine", load=1.5, other_cpu_fraction=0.34, memory_pressure_fraction=0.02, cpu_mhz=2600.0)
OVERLAP = Overlap(
    generation_s=5.0,
    hidden_s=3.0,
    engine_idle_fraction=0.1,
    learner_idle_fraction=0.2,
    score_s=0.3,
    exposed_score_s=0.05,
    publish_s=0.4,
    exposed_publish_s=0.06,
    num_awaited=8,
    num_restarted=9,
    num_regenerated=10,
)
OF_OVERLAP = {
    **named("rollout", tokens_per_s=20.0),  # 100 tokens in 5 s, not in the 4 s that training waited
    **named("overlap", generation_s=5.0, hidden_generation_s=3.0, engine_idle_fraction=0.1, learner_idle_fraction=0.2),
    **named("overlap", score_s=0.3, exposed_score_s=0.05, publish_s=0.4, exposed_publish_s=0.06),
    **named("overlap", awaited_rollouts=8, restarted_rollouts=9, regenerated_rollouts=10),
}
OF_ACCEPTANCE = {
    **named("spec", mean_acceptance_length=2.2, acceptance_rate=0.6),
    **named("spec", acceptance_rate_pos_1=0.8, acceptance_rate_pos_2=0.4),
}
OF_DECISION = {
    **named("draft", trained=1.0, length=2.5, reference_length=3.5),
    **named("draft", expected_saved_s=6.0, lost_s=1.25, train_s=0.0),
}
OF_SAMPLING = {
    **named("sampling", batches=3, groups=19, groups_with_signal=5, groups_filled=4, groups_surplus=2),
    **named("sampling", extra_generation_s=1.5),
}
OF_EVALUATION = {
    **named("validation", avg_at_4=0.25, avg_at_4_low=0.1, avg_at_4_high=0.4, maj_at_4=0.5),
    **named("validation", truncated_fraction=0.125, num_timeouts=1),
}
PROBE = AutopilotStep(speculates=False, is_probe=True, token_ms=0.5)
ROWS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "its machine, as far as it could be read": ({"machine": USE}, OF_MACHINE),
    "GPUs at their clock": (
        {"machine": replace(USE, sm_clock_mhz=1500.0)},
        OF_MACHINE | {"machine/sm_clock_mhz": 1500.0, "machine/throttled": 0.0},
    ),
    "GPUs that are slowed down": (
        {"machine": replace(USE, sm_clock_mhz=1500.0, throttle_reasons=("power cap",))},
        OF_MACHINE | {"machine/sm_clock_mhz": 1500.0, "machine/throttled": 1.0},
    ),
    "what overlapped, and the engines' own rate": ({"overlap": OVERLAP}, OF_OVERLAP),
    "a draft and a probe": (
        {"acceptance": ACCEPTANCE, "refit": replace(STEP.refit, probe_difference=0.05)},
        OF_ACCEPTANCE | {"refit/probe_difference": 0.05},
    ),
    "a draft that may be trained": (
        {"draft_version": 3, "draft_decision": DECISION},
        OF_DECISION | {"draft/version": 3},
    ),
    "a draft that was trained": (
        {"draft_decision": replace(DECISION, cost_s=0.75), "draft_update": UPDATE},
        OF_DECISION | {"draft/train_s": 0.5, "draft/expected_cost_s": 0.75, "draft/loss": 1.25},
    ),
    "a draft that is left alone": (
        {"draft_decision": replace(DECISION, trains=False)},
        OF_DECISION | {"draft/trained": 0.0},
    ),
    "a probe without drafts": ({"autopilot": PROBE}, {"spec/autopilot_speculates": 0.0, "spec/autopilot_probes": 1.0}),
    "drafts under the autopilot": (
        {"autopilot": replace(PROBE, speculates=True, is_probe=False)},
        {"spec/autopilot_speculates": 1.0, "spec/autopilot_probes": 0.0},
    ),
    "engines that generated nothing": (
        {"times": replace(STEP.times, generation_s=0.0)},
        {"time/generation_s": 0.0, "rollout/tokens_per_s": 0.0},
    ),
    "engines that generated for half a second": (
        {"times": replace(STEP.times, generation_s=0.5)},
        {"time/generation_s": 0.5, "rollout/tokens_per_s": 200.0},
    ),
    "a learner that knows its entropy": ({"train": replace(STEP.train, entropy=0.75)}, {"train/entropy": 0.75}),
    "what it sampled in place of groups without signal": ({"dynamic_sampling": SAMPLED}, OF_SAMPLING),
    "the accuracy of the policy that sampled it": ({"evaluation": EVALUATION}, OF_EVALUATION),
    "an accuracy without an interval": (
        {"evaluation": replace(EVALUATION, ci95=None)},
        {name: value for name, value in OF_EVALUATION.items() if not name.endswith(("_low", "_high"))},
    ),
}


@pytest.mark.parametrize(("changes", "added"), ROWS.values(), ids=ROWS)
def test_a_step_shows_what_only_some_have(changes: dict[str, Any], added: dict[str, float]) -> None:
    found = metrics_of(replace(STEP, **changes))
    assert found == METRICS | added
    check_metrics(found, step=0)


def test_ratios_are_shown_of_each_lag_and_over_all_tokens() -> None:
    young = LagStats(
        lag=0, num_tokens=30, ratio_mean=1.0, ratio_max=1.5, clipped_fraction=0.1, effective_sample_size=0.9
    )
    old = LagStats(
        lag=2, num_tokens=10, ratio_mean=1.2, ratio_max=1.25, clipped_fraction=0.5, effective_sample_size=0.5
    )
    found = metrics_of(replace(STEP, lags=(young, old)))
    assert found == METRICS | {
        **named("offpolicy", lag_mean=0.5, lag_max=2, ratio_mean=pytest.approx(1.05), ratio_max=1.5),
        **named("offpolicy", clipped_fraction=pytest.approx(0.2), effective_sample_size=pytest.approx(0.8)),
        **named("offpolicy", tokens_fraction_lag_0=0.75, ratio_mean_lag_0=1.0, ratio_max_lag_0=1.5),
        **named("offpolicy", clipped_fraction_lag_0=0.1, effective_sample_size_lag_0=0.9),
        **named("offpolicy", tokens_fraction_lag_2=0.25, ratio_mean_lag_2=1.2, ratio_max_lag_2=1.25),
        **named("offpolicy", clipped_fraction_lag_2=0.5, effective_sample_size_lag_2=0.5),
    }
    check_metrics(found, 0)


def test_a_step_in_words() -> None:
    line = "step 7/24, reward 0.125, 32.00 s (generation 4.00 s, 25 tokens/s)"
    few, filled = replace(SAMPLED, num_filled=0), f"{line}; 5 of 19 groups in 3 batches had signal"
    said: list[tuple[dict[str, Any], str]] = [
        ({}, line),
        ({"acceptance": ACCEPTANCE}, f"{line}, AL 2.20"),
        ({"evaluation": EVALUATION}, f"{line}; after step {STEP.step} avg@4 was 0.250"),
        ({"draft_update": UPDATE}, f"{line}, draft trained in 0.50 s"),
        ({"dynamic_sampling": few}, filled),
        ({"dynamic_sampling": SAMPLED}, f"{filled}, 4 without it filled the step"),
        ({"dynamic_sampling": replace(few, num_batches=1)}, line),
        ({"acceptance": ACCEPTANCE, "autopilot": PROBE}, f"{line}, not drafted"),
        ({"acceptance": ACCEPTANCE, "autopilot": replace(PROBE, speculates=True)}, f"{line}, AL 2.20"),
    ]
    assert [step_line(replace(STEP, **changes), 24) for changes, _ in said] == [words for _, words in said]


class Clock:
    """Starts at 0 s and stands still."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now() -> Clock:
    return Clock()


@pytest.fixture
def watch(now: Clock) -> Stopwatch:
    return Stopwatch(now_s=now)


def test_a_clock_reads_the_machine_before_and_after_its_step_and_outside_its_time(now: Clock) -> None:
    """Each reading takes 5 s and counts another 30 of 100 ticks as busy with other work."""
    readings: list[float] = []

    def read() -> Counters:
        now.now += 5.0
        readings.append(now.now)
        busy = 30 * len(readings)
        cores = (busy, 0, 0, 100 * len(readings) - busy, 0, 0, 0, 0)
        return Counters(at_s=now.now, cores=cores, own_ticks={}, pressure_us=None)

    clock = StageClock(now_s=now, read_counters=read)
    now.now += 2.0
    assert clock.times().step_s == 2.0
    assert clock.machine_use().other_cpu_fraction == 0.3


def test_a_stage_that_is_entered_twice_adds_up_and_one_that_fails_counts(now: Clock) -> None:
    clock = StageClock(now_s=now)
    for seconds in (1.0, 2.0):
        with clock.stage("data"):
            now.now += seconds
        clock.add("logprob", 10 * seconds)  # measured elsewhere
    with pytest.raises(RuntimeError, match="out of memory"), clock.stage("train"):
        now.now += 4.0
        raise RuntimeError("out of memory")
    now.now += 8.0
    assert clock.times() == replace(NO_TIMES, data_s=3.0, logprob_s=30.0, train_s=4.0, step_s=15.0)


def follow(now: Clock, watch: Stopwatch, events: str) -> StageTimes:
    """The times of a clock while time passes.

    Engine, learner and delivery work from one time to another, an export and a wait for a delivery last until a time,
    and a wait until one, for rollouts that the engines had at others.
    """
    clock, activities = StageClock(now), {"engine": watch.engine, "delivery": watch.delivery, "learner": watch.learner}
    for event in events.split(", "):
        name, *words = event.split()
        at_s = [float(word) for word in words]
        found = [scored(generated_s=each) for each in at_s[1:]]

        def passed(end_s: float = at_s[0], found: Any = found) -> Any:
            now.now = end_s
            return found

        if name == "export":
            with watch.exporting():
                passed()
        elif name == "wait":
            assert watch.waited(clock, passed) == passed()
        elif name == "delivered":
            assert watch.delivered(clock, passed) == passed()
        else:
            passed()
            with activities[name].busy() if name in activities else nullcontext():
                now.now = at_s[-1]
    return clock.times()


@rows(
    """
rollouts that were there leave the whole export exposed
    delivery 5 6, engine 6 8 | export 12, wait 12 8 | 2 0 0 | 3
an export while the engines generate costs nothing
    engine 5 15 | export 12, wait 15 15 | 0 5 0 | 2
what is left of an export when the rollouts are there is exposed, and scores come after
    engine 5 11 | export 14, wait 17 11 | 3 1 3 | 4
a wait for rollouts is first one for the weights that the engines took before
    delivery 5 6, engine 6 13 | wait 13 13 | 1 2 0 | 1
a wait that is shorter than the delivery is all publication
    delivery 5 9, engine 9 10.5 | wait 11 10.5 | 0.5 0 0.5 | 4
a delivery after the rollouts held nothing up
    delivery 12 13, engine 5 12 | wait 14 12 | 0 2 2 | 1
an export while engines stand still, as without a lag, is part of the wait
    - | export 2, delivery 2 3, engine 3 7, wait 7.5 7 | 3 4 0.5 | 3
a wait for the delivery itself is publication but while engines generate, and counts once
    - | engine 0 2, delivery 2 3, until 0, delivered 3, engine 3 3.5, wait 4 4 | 1 2.5 0 | 1
engines that generate all the time leave nothing of the delivery exposed
    - | engine 0 2, until 0, delivered 2 | 0 2 0 | 0
a wait for nothing is no generation
    - | wait 2 | 0 0 2 | 0
an export counts for the wait after it alone
    - | export 2, wait 2 0, wait 5 5 | 2 3 0 | 2
the latest rollouts of a wait end its generation
    - | wait 6 1 4 3 | 0 4 2 | 0
several waits of one step add up
    - | wait 1 0, wait 3 0, delivered 6, delivered 10 | 7 0 3 | 0
"""
)
def test_a_wait_is_publication_generation_and_scores_one_after_the_other(
    now: Clock, watch: Stopwatch, given: str, expected: str
) -> None:
    """After what came before a step: its events, seconds of publication, generation and scores, and those of a refit.

    A step begins at 10 s, of which the rollouts before were there at 5 s, or at 0 s where nothing came before.
    """
    before, events, seconds, publish_s = (each.strip() for each in expected.split("|"))
    times_s = tuple(float(each) for each in seconds.split())
    if before != "-":
        follow(now, watch, "wait 5 5")
        watch.overlap()
        follow(now, watch, before)
        now.now = 10.0
    start_s = now.now
    times = follow(now, watch, events)
    assert (times.prepare_s, times.generation_s, times.data_s) == times_s
    assert times.step_s == now.now - start_s
    overlap = watch.overlap()
    assert (overlap.exposed_publish_s, overlap.exposed_score_s) == (times_s[0], times_s[2])
    assert overlap.publish_s == float(publish_s)


def test_a_step_starts_from_nothing_and_one_that_took_no_time_was_idle(now: Clock) -> None:
    watch = Stopwatch(num_regenerated=3, now_s=now)
    follow(now, watch, "export 1, wait 2 0.5")
    assert (watch.overlap().num_regenerated, watch.overlap().num_regenerated) == (3, 0)
    idle = overlapping(engine_idle_fraction=1.0, learner_idle_fraction=1.0)
    assert watch.overlap() == idle  # and nothing is divided by the time of this step
    now.now = 4.0
    assert watch.overlap() == idle


def test_what_engines_scorer_and_learner_did_in_a_step_and_what_of_it_at_once(now: Clock, watch: Stopwatch) -> None:
    """Of 10 s: engines 0 to 6, of which they rested 2; the learner 4 to 9; the scorer 6 to 7. In the next 4 s none."""
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

    found = watch.overlap()
    assert (found.generation_s, found.hidden_s, found.score_s) == (6.0, 2.0, 1.0)
    assert (found.engine_idle_fraction, found.learner_idle_fraction) == (pytest.approx(0.6), pytest.approx(0.5))
    assert (found.num_awaited, found.num_restarted) == (5, 6)
    now.now = 14.0
    found = watch.overlap()
    assert found.generation_s == found.hidden_s == found.score_s == 0.0
    assert (found.engine_idle_fraction, found.learner_idle_fraction) == (1.0, 1.0)
    assert (found.num_awaited, found.num_restarted, found.num_regenerated) == (0, 0, 0)


def test_shares_are_of_the_step_alone_without_the_turn_of_another_arm(now: Clock, watch: Stopwatch) -> None:
    """Steps of 0.5 s, of which engines work 0.25, and of 4 s after such a turn, of which the learner works 3."""
    now.now = 10.0
    watch.overlap()
    follow(now, watch, "engine 10 10.25, until 10.5")
    assert watch.overlap().engine_idle_fraction == 0.5
    now.now = 100.0
    watch.restart()
    follow(now, watch, "learner 100 103, until 104")
    assert watch.overlap().learner_idle_fraction == 0.25


def test_work_is_cut_at_the_ends_of_a_step_and_counted_in_both(now: Clock) -> None:
    activity = Activity(now)
    now.now = 1.0
    with activity.busy():
        now.now = 3.0
        assert activity.between(0.0, 2.0) == [(1.0, 2.0)]  # what goes on is included
        assert activity.between(0.0, 1.0) == []
        activity.forget(2.0)
        now.now = 5.0
    with pytest.raises(ZeroDivisionError), activity.busy():
        now.now = 6.0
        raise ZeroDivisionError
    now.now = 7.0
    assert activity.between(2.0, 10.0) == [(2.0, 5.0), (5.0, 6.0)]
    assert activity.between(6.0, 7.0) == activity.between(-1.0, 1.0) == []  # nothing of it from its end on
    for forgotten_s in (5.0, 5.5):
        activity.forget(forgotten_s)
        assert activity.between(0.0, 10.0) == [(5.0, 6.0)]
    activity.forget(6.0)
    assert activity.between(0.0, 10.0) == []
    activity.rested(0.5)
    activity.rested(0.25)
    assert (activity.take_rest(), activity.take_rest()) == (0.75, 0.0)


def test_what_two_did_at_the_same_time_is_counted_once() -> None:
    ours, theirs = [(0.0, 2.0), (3.0, 6.0)], [(1.0, 4.0), (5.0, 9.0)]
    assert (total_s(ours), total_s(theirs)) == (5.0, 7.0)
    assert common(ours, theirs) == [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]
    assert common(ours, []) == []
