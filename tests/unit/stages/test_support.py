"""What the stages share: the types that `auto` stands for are settled once an execution."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.recipe import load_recipe
from slipstream.records.files import write_record
from slipstream.records.run import NumericsRecord
from slipstream.stages.context import RunContext
from slipstream.stages.support import numerics, recipe_layout, settled
from slipstream.types import Dtype

MEASURED = NumericsRecord(dtype="float32", reason="hand-made", float32_ms=1.0, bfloat16_ms=9.0, capabilities=())


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return RunContext(execution="run", root=str(tmp_path), experiment="tiny", workload="rl_zero")


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_learner_and_engine_both_compute_in_what_the_execution_settled_on(context: RunContext, dtype: Dtype) -> None:
    write_record(replace(MEASURED, dtype=dtype.value), context.directory("numerics") / "numerics.json")
    recipe = settled(context, load_recipe("tiny"))
    assert (recipe.learner.dtype, recipe.engine.dtype) == (dtype, dtype)


def test_the_first_stage_measures_and_the_others_take_its_answer(context: RunContext) -> None:
    recipe = load_recipe("tiny")
    first = numerics(context, recipe)
    assert first is not None
    kept = (context.directory("numerics") / "numerics.json").read_bytes()
    assert numerics(context, recipe) == first
    assert (context.directory("numerics") / "numerics.json").read_bytes() == kept
    assert settled(context, recipe).learner.dtype == first.dtype


def test_a_type_that_the_recipe_names_stays_and_nothing_is_measured(context: RunContext) -> None:
    named = load_recipe("tiny", overrides={"learner": {"dtype": "float32"}, "engine": {"dtype": "bfloat16"}})
    assert settled(context, named) == named
    assert numerics(context, named) is None
    mixed = settled(context, load_recipe("tiny", overrides={"learner": {"dtype": "float32"}}))
    assert mixed.learner.dtype is Dtype.FLOAT32
    assert mixed.engine.dtype is not Dtype.AUTO


def test_a_run_is_projected_from_itself_only_with_the_draft_whose_cost_the_simulator_knows() -> None:
    assert recipe_layout(load_recipe("tiny")) is not None
    for method in ("ngram", "draft_model"):
        assert recipe_layout(load_recipe("tiny", overrides={"draft": {"method": method}})) is None
