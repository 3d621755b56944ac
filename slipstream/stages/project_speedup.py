"""Project the measured speedup to other draft lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.recipe import Recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord, by_loop
from slipstream.simulator.projection import project_speedup as project
from slipstream.stages.context import RunContext
from slipstream.stages.support import recipe_layout, settled


def project_speedup(context: RunContext, recipe: Recipe, *, tuning: Path | None, arms: Sequence[Path]) -> Path:
    """Calibrate the simulator on the run and project from it; return a directory with projection.json."""
    directory = context.directory("project_speedup")
    synchronous, _ = by_loop(read_record(ArmRecord, arm / "arm.json") for arm in arms)
    record = project(
        synchronous,
        None if tuning is None else read_record(TuningRecord, tuning / "tuning.json"),
        layout=recipe_layout(settled(context, recipe)),
        execution=context.execution,
    )
    write_record(record, directory / "projection.json")
    return directory
