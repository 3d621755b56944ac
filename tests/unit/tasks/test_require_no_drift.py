"""The last task of the chain, called as Flyte calls it: the report passes, or the error says what drifted."""

from __future__ import annotations

from pathlib import Path

import pytest
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.recipe import load_recipe, write_recipe
from slipstream.records.files import write_record
from slipstream.records.run import DriftFinding, DriftRecord
from tasks.require_no_drift import require_no_drift

FINDING = DriftFinding(name="step_speedup", value=1.0, num_executions=5, band=(1.4, 1.6), verdict="below")
DRIFTED = DriftRecord(summary="Drift: step speedup 1 lies below 1.4 to 1.6.", findings=(FINDING,))


def check(directory: Path, *, fail: bool) -> str:
    """The report that the task hands on."""
    write_record(DRIFTED, directory / "drift.json")
    overrides = {"tracking": {"drift": {"fail": fail}}}
    path = write_recipe(load_recipe("tiny", overrides=overrides), directory / "recipe.yaml")
    given = {"recipe": FlyteFile(str(path)), "report": FlyteDirectory(str(directory))}
    return str(require_no_drift(**given).report)  # type: ignore[union-attr]  # flytekit's call gives the named outputs


def test_drift_passes_where_the_recipe_does_not_ask_to_fail(tmp_path: Path) -> None:
    assert check(tmp_path, fail=False) == str(tmp_path)


def test_drift_fails_the_task_with_what_drifted(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"step speedup 1 lies below 1\.4 to 1\.6\. The report is written"):
        check(tmp_path, fail=True)
