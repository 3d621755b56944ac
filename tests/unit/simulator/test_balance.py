"""Asynchronous arms and splits, from measured stages."""

from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import ConfigError
from slipstream.recipe import load_recipe
from slipstream.records.run import LayoutRecord
from slipstream.records.steps import ArmRecord
from slipstream.simulator.balance import CoreSlowdowns, PredictedArm, balance, measured_slowdowns, predict_asynchronous
from slipstream.simulator.settings import Prior
from slipstream.simulator.step_cost import Bound
from slipstream.stages.support import recipe_layout
from slipstream.types import Arm, LoopMode, StageTimes
from tests.unit.report.handmade import demo_arms, demo_run
from tests.unit.sampled import overlapping

_ENGINE, _LEARNER = (Prior(median=median, log_sd=0.1, source="by hand") for median in (1.25, 2.0))
HALF_AS_FAST_LEARNER = CoreSlowdowns(engine=_ENGINE, learner=_LEARNER)


def with_stages(arm: ArmRecord, **stages: float) -> ArmRecord:
    """The arm, every step of it with these stages and 0.1 s of refit."""
    times = StageTimes.in_sequence(**{"data_s": 0.0, "prepare_s": 0.1, "logprob_s": 0.0, **stages})
    return replace(arm, steps=tuple(replace(step, times=times) for step in arm.steps))


staged = partial(with_stages, demo_arms()[0])


def predicted(arm: ArmRecord, mode: LoopMode = LoopMode.ONE_STEP_OFF, lag: int = 1) -> PredictedArm:
    return predict_asynchronous([arm], lag=lag, mode=mode, slowdowns={arm.arm: HALF_AS_FAST_LEARNER}).arms[0]


def test_what_takes_longer_of_generation_and_update_hides_the_other() -> None:
    # 4 s on two cores are 5 s on one; 1 s of training 2 s. 0.1 + 5.
    found = predicted(staged(generation_s=4.0, train_s=1.0))
    assert (found.step_s, found.exposed_s, found.hidden_s) == pytest.approx((5.1, 3.0, 2.0))
    assert (found.synchronous_step_s, found.bound) == (pytest.approx(5.1), Bound.DRAINED)
    assert found.step_p10_s < found.step_s < found.step_p90_s
    found = predicted(staged(generation_s=0.8, train_s=2.0, logprob_s=1.0, data_s=0.5))
    assert (found.step_s, found.exposed_s, found.hidden_s) == pytest.approx((6.6, 0.0, 1.0))
    assert found.bound is Bound.LEARNER


def test_batches_stand_beside_the_step_before_theirs() -> None:
    # Generation 1 and 3 s in turn, training 2 s on one core: batch t + 1 beside step t exposes 1.75 s every other step.
    arm = demo_arms()[0]
    first, *others = arm.steps[:5]
    base = StageTimes.in_sequence(data_s=0.0, prepare_s=0.0, generation_s=1.0, logprob_s=0.0, train_s=1.0)
    timed = [replace(step, times=base.with_generation(1.0 + 2.0 * (i % 2))) for i, step in enumerate(others)]
    found = predicted(replace(arm, steps=(first, *timed)))
    assert found.exposed_s == pytest.approx(0.5 * 1.75)
    assert found.step_s == pytest.approx(2.0 + 0.875)


@given(st.integers(1, 4), st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_engines_that_fly_are_never_slower_and_lag_helps(lag: int, generation_s: float, train_s: float) -> None:
    arm = staged(generation_s=generation_s, train_s=train_s)
    arm = replace(arm, steps=arm.steps[:3])
    loops = ((LoopMode.ONE_STEP_OFF, lag), (LoopMode.IN_FLIGHT, lag), (LoopMode.IN_FLIGHT, lag + 1))
    drained, flying, farther = (predicted(arm, mode, number).step_s for mode, number in loops)
    assert farther <= flying + 1e-6 <= drained + 2e-6
    assert farther >= 0.1 + 2.0 * train_s - 1e-9  # nothing is faster than its learner


def test_engines_that_are_never_drained_by_hand() -> None:
    # 4 s drained on one core with 65 % fixed, lag 1, no training to speak of: u = 1/2, T = 4 (0.325 + 0.35) = 2.7 s.
    found = predicted(staged(generation_s=3.2, train_s=1e-9), LoopMode.IN_FLIGHT)
    assert found.step_s == pytest.approx(0.1 + 2.7, rel=1e-3)
    assert found.bound is Bound.LAG


def test_both_arms_are_predicted_by_belief_with_its_source_or_by_factors_of_both_loops() -> None:
    found = predict_asynchronous(demo_arms(), lag=1, mode=LoopMode.IN_FLIGHT)
    assert [arm.arm for arm in found.arms] == [Arm.AUTOREGRESSIVE, Arm.SPECULATIVE]
    assert found.arms[0].step_s < found.arms[0].synchronous_step_s
    assert [arm.bound for arm in found.arms] == [Bound.LEARNER, Bound.LEARNER]
    assert "4.45 over 4.15 s" in found.sources["speculative"]
    alone = staged(generation_s=2.0, train_s=1.0)
    overlap = overlapping(generation_s=2.5, hidden_s=1.5)
    beside = with_stages(alone, generation_s=1.0, train_s=1.5)
    assert measured_slowdowns(alone, beside) is None
    beside = replace(beside, steps=tuple(replace(step, overlap=overlap) for step in beside.steps))
    found = measured_slowdowns(alone, beside)
    assert found is not None
    assert (found.engine.median, found.learner.median) == (pytest.approx(1.25), pytest.approx(1.5))


_MODEL: Any = {"model": "qwen3-8b", "hardware": "gb200", "precision": "bfloat16", "learner_precision": "bfloat16"}
LAYOUT = LayoutRecord(**_MODEL, num_gpus=16, gpus_per_engine=2, max_response_tokens=160)


def test_two_cores_have_one_split() -> None:
    found = balance(demo_run())
    predicted = predict_asynchronous(demo_run().arms, lag=1, mode=LoopMode.IN_FLIGHT).arms
    assert found.unit == "core"
    assert [(row.generation, row.training, row.step_s) for row in found.rows] == [(1, 1, p.step_s) for p in predicted]


def test_every_split_in_whole_engines_or_nodes_is_listed_for_each_arm() -> None:
    found = balance(replace(demo_run(), layout=LAYOUT), mode=LoopMode.ONE_STEP_OFF)
    for arm in Arm:
        rows = [row for row in found.rows if row.arm is arm]
        assert [row.generation for row in rows] == [2, 4, 6, 8, 10, 12, 14]
        assert all(row.generation + row.training == 16 for row in rows)
        best = found.best(arm)
        assert best.step_s == min(row.step_s for row in rows)
        # More GPUs for generation hide more of it and leave the learner fewer.
        exposed = [row.exposed_s for row in rows]
        assert exposed == sorted(exposed, reverse=True)
        assert rows[-1].bound is Bound.LEARNER
    found = balance(replace(demo_run(), layout=LAYOUT), gpus_per_node=8)
    layout = recipe_layout(load_recipe("qwen3_8b"))
    assert layout is not None and layout.generation_gpus == 0  # colocated
    assert {(row.generation, row.training) for row in found.rows} == {(8, 8)}


def test_a_split_takes_generation_on_its_gpus_as_measured_and_a_learner_on_half_of_them_twice_as_long() -> None:
    # A run on a split of 12 and 4: drained on the same 12, generation takes what was measured.
    layout = replace(LAYOUT, generation_gpus=12)
    found = balance(replace(demo_run(), layout=layout), mode=LoopMode.ONE_STEP_OFF)
    row = next(row for row in found.rows if row.generation == 12 and row.arm is Arm.AUTOREGRESSIVE)
    stages = [step.times for step in demo_run().arms[0].timed_steps]
    busy_s = fmean(times.data_s + times.logprob_s + times.train_s for times in stages)
    generation_s = fmean(times.generation_s for times in stages)
    assert row.exposed_s == pytest.approx(max(0.0, generation_s - busy_s))
    assert row.step_s == pytest.approx(max(generation_s, busy_s) + fmean(times.prepare_s for times in stages))
    row = next(row for row in balance(replace(demo_run(), layout=LAYOUT)).rows if row.generation == 8)
    learner_s = 2 * fmean(times.logprob_s + times.train_s for times in stages)
    rest_s = fmean(times.data_s + times.prepare_s for times in stages)
    assert row.step_s == pytest.approx(learner_s + rest_s + row.exposed_s)


def test_a_learner_may_train_on_fewer_gpus_than_an_engine_needs() -> None:
    layout = replace(LAYOUT, num_gpus=12, gpus_per_engine=8, generation_gpus=8)
    rows = balance(replace(demo_run(), layout=layout), mode=LoopMode.ONE_STEP_OFF).rows
    assert {(row.generation, row.training) for row in rows} == {(8, 4)}
    times = [step.times for step in demo_run().arms[0].timed_steps]
    busy_s = fmean(each.data_s + each.logprob_s + each.train_s for each in times)
    generation_s = fmean(each.generation_s for each in times)
    assert rows[0].step_s == pytest.approx(max(generation_s, busy_s) + fmean(each.prepare_s for each in times))


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="must leave a GPU for training beside an engine of 2"):
        balance(replace(demo_run(), layout=replace(LAYOUT, num_gpus=2)))
    with pytest.raises(ConfigError, match=r"must be of a recipe that names its simulator\.model"):
        balance(replace(demo_run(), layout=None))
    with pytest.raises(ConfigError, match="--mode must be asynchronous"):
        balance(demo_run(), mode=LoopMode.SYNCHRONOUS)
