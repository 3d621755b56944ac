"""The asynchronous arms on two cores, from hand-worked stages of the synchronous ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import ConfigError
from slipstream.records.steps import ArmRecord, Overlap
from slipstream.simulator.cost.asynchronous_cost import Bound
from slipstream.simulator.cost.parameters import Prior
from slipstream.simulator.project.asynchronous_projection import (
    CoreSlowdowns,
    PredictedArm,
    believed_slowdowns,
    measured_slowdowns,
    predict_asynchronous,
)
from slipstream.types import Arm, LoopMode, StageTimes

DemoArms = Callable[[float], tuple[ArmRecord, ...]]
HALF_AS_FAST_LEARNER = CoreSlowdowns(
    engine=Prior(median=1.25, log_sd=0.1, source="by hand"), learner=Prior(median=2.0, log_sd=0.1, source="by hand")
)


def with_stages(arm: ArmRecord, **stages: float) -> ArmRecord:
    """The arm, every step of it with these stages and 0.1 s of refit."""
    times = StageTimes.in_sequence(**{"data_s": 0.0, "prepare_s": 0.1, "logprob_s": 0.0, **stages})
    return replace(arm, steps=tuple(replace(step, times=times) for step in arm.steps))


def predicted(
    arm: ArmRecord, mode: LoopMode = LoopMode.ONE_STEP_OFF, lag: int = 1, helps: bool = False
) -> PredictedArm:
    (found,) = predict_asynchronous(
        [arm], lag=lag, mode=mode, slowdowns={arm.arm: HALF_AS_FAST_LEARNER}, idle_core_helps=helps
    ).arms
    return found


def test_a_long_generation_is_exposed_beyond_the_trainer(demo_arms: DemoArms) -> None:
    # 4 s on two cores are 5 s on one; 1 s of training 2 s. 0.1 + 5.
    found = predicted(with_stages(demo_arms(1.0)[0], generation_s=4.0, train_s=1.0))
    assert (found.step_s, found.exposed_s, found.hidden_s) == pytest.approx((5.1, 3.0, 2.0))
    assert (found.synchronous_step_s, found.bound) == (pytest.approx(5.1), Bound.DRAINED)
    assert found.step_p10_s < found.step_s < found.step_p90_s


def test_a_long_update_hides_all_of_generation(demo_arms: DemoArms) -> None:
    found = predicted(with_stages(demo_arms(1.0)[0], generation_s=0.8, train_s=2.0, logprob_s=1.0, data_s=0.5))
    assert (found.step_s, found.exposed_s, found.hidden_s) == pytest.approx((6.6, 0.0, 1.0))
    assert found.bound is Bound.LEARNER


def test_a_core_that_falls_idle_helps_the_other(demo_arms: DemoArms) -> None:
    # The engine is ready after 1 s; 3 of the learner's 4 s are left and take half of that on both cores.
    found = predicted(with_stages(demo_arms(1.0)[0], generation_s=0.8, train_s=2.0), helps=True)
    assert found.step_s == pytest.approx(0.1 + 1.0 + 1.5)
    # The learner is ready after 2 s; 3 of the engine's 5 s are left and take 3 / 1.25.
    found = predicted(with_stages(demo_arms(1.0)[0], generation_s=4.0, train_s=1.0), helps=True)
    assert found.step_s == pytest.approx(0.1 + 2.0 + 2.4)


def test_without_the_pass_for_logprobs_a_step_is_that_much_shorter(demo_arms: DemoArms) -> None:
    arm = with_stages(demo_arms(1.0)[0], generation_s=0.8, train_s=2.0, logprob_s=1.0)
    slowdowns = {arm.arm: HALF_AS_FAST_LEARNER}
    found = predict_asynchronous([arm], lag=1, mode=LoopMode.ONE_STEP_OFF, slowdowns=slowdowns, has_logprob_pass=False)
    assert found.arms[0].step_s == pytest.approx(0.1 + 4.0)


def test_batches_stand_beside_the_step_before_theirs(demo_arms: DemoArms) -> None:
    # Generation 1 and 3 s in turn, training 2 s on one core: batch t + 1 beside step t exposes 1.75 s every other step.
    arm = demo_arms(1.0)[0]
    first, *others = arm.steps[:5]
    base = StageTimes.in_sequence(data_s=0.0, prepare_s=0.0, generation_s=1.0, logprob_s=0.0, train_s=1.0)
    timed = [replace(step, times=base.with_generation(1.0 + 2.0 * (i % 2))) for i, step in enumerate(others)]
    found = predicted(replace(arm, steps=(first, *timed)))
    assert found.exposed_s == pytest.approx(0.5 * 1.75)
    assert found.step_s == pytest.approx(2.0 + 0.875)


@given(st.integers(1, 4), st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_engines_that_are_never_drained_are_never_slower_and_more_lag_helps(
    demo_arms: DemoArms, lag: int, generation_s: float, train_s: float
) -> None:
    arm = with_stages(demo_arms(1.0)[0], generation_s=generation_s, train_s=train_s)
    arm = replace(arm, steps=arm.steps[:3])
    drained, flying, farther = (
        predicted(arm, mode, number).step_s
        for mode, number in ((LoopMode.ONE_STEP_OFF, lag), (LoopMode.IN_FLIGHT, lag), (LoopMode.IN_FLIGHT, lag + 1))
    )
    assert farther <= flying + 1e-6 <= drained + 2e-6
    assert farther >= 0.1 + 2.0 * train_s - 1e-9  # nothing is faster than its learner


def test_engines_that_are_never_drained_by_hand(demo_arms: DemoArms) -> None:
    # 4 s drained on one core with 65 % fixed, lag 1, no training to speak of: u = 1/2, T = 4 (0.325 + 0.35) = 2.7 s.
    found = predicted(with_stages(demo_arms(1.0)[0], generation_s=3.2, train_s=1e-9), LoopMode.IN_FLIGHT)
    assert found.step_s == pytest.approx(0.1 + 2.7, rel=1e-3)
    assert found.bound is Bound.LAG


def test_both_arms_of_a_run_are_predicted_by_belief_with_its_source(demo_arms: DemoArms) -> None:
    found = predict_asynchronous(demo_arms(1.0), lag=1, mode=LoopMode.IN_FLIGHT)
    assert [arm.arm for arm in found.arms] == [Arm.AUTOREGRESSIVE, Arm.SPECULATIVE]
    assert found.arms[0].step_s < found.arms[0].synchronous_step_s
    assert [arm.bound for arm in found.arms] == [Bound.LEARNER, Bound.LEARNER]
    assert "4.45 over 4.15 s" in found.sources["speculative"]
    assert (believed_slowdowns().engine.median, believed_slowdowns().learner.median) == (1.07, 1.54)


def test_an_arm_that_ran_in_both_loops_gives_its_own_factors(demo_arms: DemoArms) -> None:
    alone = with_stages(demo_arms(1.0)[0], generation_s=2.0, train_s=1.0)
    overlap = Overlap(
        generation_s=2.5,
        hidden_s=1.5,
        engine_idle_fraction=0.0,
        learner_idle_fraction=0.0,
        score_s=0.0,
        exposed_score_s=0.0,
        publish_s=0.0,
        exposed_publish_s=0.0,
    )
    beside = with_stages(alone, generation_s=1.0, train_s=1.5)
    assert measured_slowdowns(alone, beside) is None
    beside = replace(beside, steps=tuple(replace(step, overlap=overlap) for step in beside.steps))
    found = measured_slowdowns(alone, beside)
    assert found is not None
    assert (found.engine.median, found.learner.median) == (pytest.approx(1.25), pytest.approx(1.5))


@pytest.mark.parametrize(("mode", "lag"), [(LoopMode.SYNCHRONOUS, 1), (LoopMode.IN_FLIGHT, 0)])
def test_a_synchronous_loop_is_not_predicted(demo_arms: DemoArms, mode: LoopMode, lag: int) -> None:
    with pytest.raises(ConfigError, match="must be"):
        predict_asynchronous(demo_arms(1.0), lag=lag, mode=mode)
