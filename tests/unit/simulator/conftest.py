"""The record of a whole run around the recorded demo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.recipe import load_recipe
from slipstream.records.files import read_record
from slipstream.records.run import RunRecord
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.stages.support import recipe_layout


@pytest.fixture
def run(demo_arms: Callable[[float], tuple[ArmRecord, ...]], demo_tuning: TuningRecord) -> RunRecord:
    recipe = load_recipe("tiny", overrides={"engine": {"dtype": "bfloat16"}, "learner": {"dtype": "bfloat16"}})
    return replace(
        read_record(RunRecord, Path(__file__).parents[1] / "golden" / "run.json"),
        execution="recorded",
        tuning=demo_tuning,
        arms=demo_arms(1.0),
        asynchronous=(),
        layout=recipe_layout(recipe),
    )
