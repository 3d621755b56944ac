"""Drift from a real MLflow store to the row of a report, the tags of a run and the failure that alerts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import write_record
from slipstream.records.run import DriftFinding, DriftRecord, RunRecord
from slipstream.report.page import write_report
from slipstream.stages.context import RunContext
from slipstream.stages.fail_run import fail_run
from slipstream.stages.report_speedup import DriftError, drift_of, require_no_drift
from slipstream.stages.runs import end_reported_execution
from slipstream.stages.start_run import start_run
from slipstream.tracking.config import DriftConfig, TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import read_executions
from tests.unit.report.handmade import RECORD, STAND_INS, beside

TWICE = beside((6.0,) * 8, (3.0,) * 8)
DRIFTED = DriftRecord(
    summary="Drift against the 5 executions before: step speedup 1 lies below 1.4 to 1.6.",
    executions=("a", "b", "c", "d", "e"),
    false_alarm_rate=0.05,
    findings=(DriftFinding(name="step_speedup", value=1.0, num_executions=5, band=(1.4, 1.6), verdict="below"),),
)


def execute(root: Path, execution: str, record: RunRecord) -> tuple[DriftRecord, RunContext, Recipe]:
    """An execution of the tiny recipe that came to `record`, through the functions that the tasks call."""
    overrides = {"tracking": {"replay_every_s": 0.1, "drift": {"num_executions": 5}}}
    context, path = start_run("tiny", root=root, execution=execution, overrides=overrides)
    recipe, directory = load_recipe(str(path)), root / execution / "report_speedup"
    drift = drift_of(context, recipe, record)
    write_record(record, directory / "run.json")
    report = write_report(record, directory, drift=drift)
    assert json.loads(report.json.read_text())["drift"]["summary"] == drift.summary
    end_reported_execution(context, recipe, record, report, drift)
    return drift, context, recipe


def slower(record: RunRecord) -> RunRecord:
    """Both arms as they were, but for generation of the speculative one: as slow as the other's."""
    base, spec = record.arms
    times = [step.times for step in base.steps]
    steps = tuple(replace(step, times=time) for step, time in zip(spec.steps, times, strict=True))
    return replace(record, arms=(base, replace(spec, steps=steps)))


@pytest.mark.slow  # seven executions in a real store
def test_the_sixth_execution_is_judged_by_the_five_before_and_its_run_says_what_drifted(
    stored_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.report.page.draw", lambda *_: STAND_INS)
    for number in range(5):
        drift, _, _ = execute(stored_root, f"tiny-{number}", TWICE)
        assert drift.executions == tuple(f"tiny-{n}" for n in reversed(range(number)))
        assert {finding.verdict for finding in drift.findings} == {"too few to say"}
    drift, _, _ = execute(stored_root, "tiny-5", slower(TWICE))
    assert drift.executions == ("tiny-4", "tiny-3", "tiny-2", "tiny-1", "tiny-0")
    names = ["generation_speedup", "step_speedup", "tokens_per_s_speculative"]
    assert [finding.name for finding in drift.outside] == names
    assert drift.findings[0].value == 1.0
    assert drift.findings[0].band == pytest.approx((1.98, 2.02))

    (run,) = read_executions(store_uri(TrackingConfig(), stored_root), names=["tiny-5"])
    assert run.tags["drift.verdict"] == ", ".join(f"{name} below" for name in names)
    assert run.tags["drift.summary"] == drift.summary
    assert (run.metrics["drift/num_outside"], run.metrics["drift/generation_speedup"]) == (3.0, -1.0)
    assert run.tags["hardware"] == "2 cores <no GPU>"
    assert run.status == "FINISHED"

    # The alert ends the run as failed; its results stay, and count for the next.
    fail_run(stored_root, "tiny-5", message=f"DriftError: {drift.summary}")
    (run,) = read_executions(store_uri(TrackingConfig(), stored_root), names=["tiny-5"])
    assert (run.status, run.tags["failed.node"]) == ("FAILED", "require_no_drift")
    assert run.metrics["result/generation_speedup"] == 1.0
    drift, _, _ = execute(stored_root, "tiny-6", TWICE)
    assert drift.executions == ("tiny-5", "tiny-4", "tiny-3", "tiny-2", "tiny-1")
    assert drift.outside == ()  # the spread has it


def test_a_store_that_cannot_be_read_is_said_so_and_sinks_nothing(tmp_path: Path) -> None:
    context = RunContext(execution="e", root=str(tmp_path), experiment="tiny", workload="rl_zero")
    recipe = load_recipe("tiny")
    assert drift_of(context, recipe, RECORD).summary.startswith(
        "Unknown, for the executions before could not be read: uri must name a store"
    )
    away = load_recipe("tiny", overrides={"tracking": {"uri": "http://127.0.0.1:9"}})
    drift = drift_of(context, away, RECORD)
    assert "tracking server http://127.0.0.1:9: " in drift.summary
    assert not drift.findings
    write_record(drift, tmp_path / "drift.json")
    assert require_no_drift(failing(recipe), tmp_path) == drift


def failing(recipe: Recipe) -> Recipe:
    return replace(recipe, tracking=replace(recipe.tracking, drift=DriftConfig(fail=True)))


def test_drift_fails_an_execution_whose_recipe_says_so_and_no_other(tmp_path: Path) -> None:
    write_record(DRIFTED, tmp_path / "drift.json")
    recipe = load_recipe("tiny")
    assert require_no_drift(recipe, tmp_path) == DRIFTED
    with pytest.raises(DriftError, match=r"step speedup 1 lies below 1\.4 to 1\.6\. The report is written"):
        require_no_drift(failing(recipe), tmp_path)
    steady = replace(DRIFTED, findings=(replace(DRIFTED.findings[0], verdict="within"),))
    write_record(steady, tmp_path / "drift.json")
    assert require_no_drift(failing(recipe), tmp_path) == steady
