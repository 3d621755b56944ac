"""The splits that a run's times suggest."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from slipstream.config import ConfigError
from slipstream.recipe import load_recipe
from slipstream.records.run import LayoutRecord, RunRecord
from slipstream.simulator.project.asynchronous_projection import predict_asynchronous
from slipstream.simulator.project.balance import balance
from slipstream.stages.support import recipe_layout
from slipstream.types import Arm, LoopMode

LAYOUT = LayoutRecord(
    model="qwen3-8b",
    hardware="gb200",
    precision="bfloat16",
    learner_precision="bfloat16",
    num_gpus=16,
    gpus_per_engine=2,
    max_response_tokens=160,
)


def test_two_cores_have_one_split(run: RunRecord) -> None:
    found = balance(run)
    predicted = predict_asynchronous(run.arms, lag=1, mode=LoopMode.IN_FLIGHT, idle_core_helps=True).arms
    assert found.unit == "core"
    assert [(row.generation, row.training, row.step_s) for row in found.rows] == [(1, 1, p.step_s) for p in predicted]
    measured_s = fmean(step.times.step_s for step in run.arms[0].timed_steps)
    assert found.synchronous_step_s["autoregressive"] == pytest.approx(measured_s)


def test_every_split_in_whole_engines_is_listed_for_each_arm(run: RunRecord) -> None:
    found = balance(replace(run, layout=LAYOUT), mode=LoopMode.ONE_STEP_OFF)
    for arm in Arm:
        rows = [row for row in found.rows if row.arm is arm]
        assert [row.generation for row in rows] == [2, 4, 6, 8, 10, 12, 14]
        assert all(row.generation + row.training == 16 for row in rows)
        best = found.best(arm)
        assert best.step_s == min(row.step_s for row in rows)
        # More GPUs for generation hide more of it and leave the learner fewer.
        exposed = [row.exposed_s for row in rows]
        assert exposed == sorted(exposed, reverse=True)
        assert rows[-1].bound == "learner"


def test_the_learner_on_half_of_its_gpus_takes_twice_as_long(run: RunRecord) -> None:
    row = next(row for row in balance(replace(run, layout=LAYOUT)).rows if row.generation == 8)
    stages = [step.times for step in run.arms[0].timed_steps]
    learner_s = 2 * fmean(times.logprob_s + times.train_s for times in stages)
    rest_s = fmean(times.data_s + times.prepare_s for times in stages)
    assert row.step_s == pytest.approx(learner_s + rest_s + row.exposed_s)


def test_generation_on_the_gpus_that_it_was_measured_on_takes_as_long(run: RunRecord) -> None:
    # A run on a split of 12 and 4: drained on the same 12, generation takes what was measured.
    layout = replace(LAYOUT, generation_gpus=12)
    found = balance(replace(run, layout=layout), mode=LoopMode.ONE_STEP_OFF)
    row = next(row for row in found.rows if row.generation == 12 and row.arm is Arm.AUTOREGRESSIVE)
    stages = [step.times for step in run.arms[0].timed_steps]
    busy_s = fmean(times.data_s + times.logprob_s + times.train_s for times in stages)
    generation_s = fmean(times.generation_s for times in stages)
    assert row.exposed_s == pytest.approx(max(0.0, generation_s - busy_s))
    assert row.step_s == pytest.approx(max(generation_s, busy_s) + fmean(times.prepare_s for times in stages))


def test_a_layout_says_how_many_gpus_generate() -> None:
    layout = recipe_layout(load_recipe("qwen3_8b"))
    assert layout is not None
    assert layout.generation_gpus == 0  # colocated


def test_only_splits_in_whole_nodes_are_listed_where_asked(run: RunRecord) -> None:
    found = balance(replace(run, layout=LAYOUT), gpus_per_node=8)
    assert {(row.generation, row.training) for row in found.rows} == {(8, 8)}


def test_what_cannot_be_split_is_refused(run: RunRecord) -> None:
    with pytest.raises(ConfigError, match="must leave a GPU for training beside an engine of 2"):
        balance(replace(run, layout=replace(LAYOUT, num_gpus=2)))
    with pytest.raises(ConfigError, match=r"must be of a recipe that names its simulator\.model"):
        balance(replace(run, layout=None))
    with pytest.raises(ConfigError, match="--mode must be asynchronous"):
        balance(run, mode=LoopMode.SYNCHRONOUS)
