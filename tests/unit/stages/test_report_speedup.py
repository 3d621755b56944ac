"""Where the last report is found; drift from an MLflow store to its row, the tags of a run and the failing alert."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.recipe import Recipe, load_recipe, parameters
from slipstream.records.files import write_record
from slipstream.records.run import DriftFinding, DriftRecord, RunRecord
from slipstream.report.drift import setting_tags
from slipstream.report.page import write_report
from slipstream.report.results import result_metrics
from slipstream.stages import report_speedup as stage
from slipstream.stages.fail_run import fail_run
from slipstream.stages.report_speedup import DriftError, _link_latest, drift_of, require_no_drift
from slipstream.stages.runs import end_reported_execution
from slipstream.stages.start_run import start_run
from slipstream.tracking.config import DriftConfig, TrackingConfig, fitted, store_uri
from slipstream.tracking.mlflow_store import Execution, read_executions
from tests.small import UNTRACKED, replace_in, run_context
from tests.unit.report.handmade import RECORD, STAND_INS, beside


def _report(root: Path, execution: str) -> Path:
    directory = root / execution / "report_speedup"
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(execution)
    return directory


def test_latest_leads_to_the_last_report_wherever_the_root_is_moved(tmp_path: Path) -> None:
    root = tmp_path / "old"
    for execution in ("first", "ablation/second"):
        _link_latest(root, _report(root, execution))
    root.rename(tmp_path / "new")
    assert (tmp_path / "new" / "latest" / "run.json").read_text() == "ablation/second"
    assert not (tmp_path / "new" / "latest").readlink().is_absolute()


def test_executions_that_end_at_one_moment_do_not_stand_in_each_others_way(tmp_path: Path) -> None:
    reports = [_report(tmp_path, f"e{number}") for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda report: _link_latest(tmp_path, report), reports))  # raises what a call raised
    assert (tmp_path / "latest" / "run.json").read_text().startswith("e")
    assert not list(tmp_path.glob(".latest*"))


def test_a_directory_that_is_called_latest_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "latest").mkdir()
    with caplog.at_level(logging.WARNING):
        _link_latest(tmp_path, _report(tmp_path, "first"))
    assert caplog.messages == [f"report_speedup: {tmp_path / 'latest'} is a directory, not our link, and is left alone"]
    assert not (tmp_path / "latest").is_symlink()


TWICE = beside((6.0,) * 8, (3.0,) * 8)
DRIFTED = DriftRecord(
    summary="Drift against the 5 executions before: step speedup 1 lies below 1.4 to 1.6.",
    executions=("a", "b", "c", "d", "e"),
    false_alarm_rate=0.05,
    findings=(DriftFinding(name="step_speedup", value=1.0, num_executions=5, band=(1.4, 1.6), verdict="below"),),
)


def execute(root: Path, execution: str, record: RunRecord) -> DriftRecord:
    """An execution of the tiny recipe that came to `record`, through the functions that the tasks call."""
    overrides = {"tracking": {"replay_every_s": 0.1, "drift": {"num_executions": 5}}}
    context, path = start_run("tiny", root=root, execution=execution, overrides=overrides)
    recipe, directory = load_recipe(str(path)), root / execution / "report_speedup"
    drift = drift_of(context, recipe, record)
    write_record(record, directory / "run.json")
    write_report(record, directory, drift=drift)
    assert json.loads((directory / "report.json").read_text())["drift"]["summary"] == drift.summary
    end_reported_execution(context, recipe, record, directory, drift)
    return drift


def slower(record: RunRecord) -> RunRecord:
    """Both arms as they were, but for generation of the speculative one: as slow as the other's."""
    base, spec = record.arms
    steps = tuple(replace(own, times=other.times) for own, other in zip(spec.steps, base.steps, strict=True))
    return replace(record, arms=(base, replace(spec, steps=steps)))


@pytest.mark.slow  # seven executions in a real store
def test_an_execution_is_judged_by_the_five_before_it(stored_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.report.page.draw", lambda *_: STAND_INS)
    for number in range(5):
        drift = execute(stored_root, f"tiny-{number}", TWICE)
        assert drift.executions == tuple(f"tiny-{n}" for n in reversed(range(number)))
        assert {finding.verdict for finding in drift.findings} == {"too few to say"}
    drift = execute(stored_root, "tiny-5", slower(TWICE))
    assert drift.executions == ("tiny-4", "tiny-3", "tiny-2", "tiny-1", "tiny-0")
    names = ["generation_speedup", "step_speedup", "tokens_per_s_speculative"]
    assert [finding.name for finding in drift.outside] == names
    assert drift.findings[0].value == 1.0
    assert drift.findings[0].band == pytest.approx((1.98, 2.02))

    (run,) = read_executions(store_uri(TrackingConfig(), stored_root), names=["tiny-5"])
    assert run.tags["drift.verdict"] == ", ".join(f"{name} below" for name in names)
    assert run.tags["drift.summary"] == drift.summary
    assert (run.metrics["drift/num_outside"], run.metrics["drift/generation_speedup"]) == (3.0, -1.0)
    assert (run.tags["hardware"], run.status) == ("2 cores <no GPU>", "FINISHED")

    # The alert ends the run as failed; its results stay, and count for the next.
    fail_run(stored_root, "tiny-5", message=f"DriftError: {drift.summary}")
    (run,) = read_executions(store_uri(TrackingConfig(), stored_root), names=["tiny-5"])
    assert (run.status, run.tags["failed.node"]) == ("FAILED", "require_no_drift")
    assert run.metrics["result/generation_speedup"] == 1.0
    drift = execute(stored_root, "tiny-6", TWICE)
    assert drift.executions == ("tiny-5", "tiny-4", "tiny-3", "tiny-2", "tiny-1")
    assert drift.outside == ()  # the spread has it


def test_a_parameter_that_is_cut_in_mlflow_leaves_executions_comparable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("tiny", overrides={"data": {"instruction": "Be brief. " * 700 + "{problem}"}})
    context, tags = run_context(tmp_path), {"workload": TWICE.workload, **setting_tags(TWICE)}
    params = fitted("param", {**parameters(recipe), "arms": context.arms})
    assert len(params["data.instruction"]) == 6000
    before = Execution(name="before", metrics=result_metrics(TWICE, hours=0, gpu_hours=0), params=params, tags=tags)
    replace_in(monkeypatch, stage, read_executions=lambda uri, experiment: [before])
    assert drift_of(context, recipe, TWICE).executions == ("before",)


def failing(recipe: Recipe) -> Recipe:
    return replace(recipe, tracking=replace(recipe.tracking, drift=DriftConfig(fail=True)))


def test_a_store_that_cannot_be_read_is_said_so_and_sinks_nothing(tmp_path: Path) -> None:
    recipe, away = load_recipe("tiny"), load_recipe("tiny", overrides={"tracking": {"uri": UNTRACKED["uri"]}})
    assert drift_of(run_context(tmp_path), recipe, RECORD).summary.startswith(
        "Unknown, for the executions before could not be read: uri must name a store"
    )
    drift = drift_of(run_context(tmp_path), away, RECORD)
    assert "tracking server http://127.0.0.1:9: " in drift.summary
    assert not drift.findings
    write_record(drift, tmp_path / "drift.json")
    require_no_drift(failing(recipe), tmp_path)


def test_drift_fails_an_execution_whose_recipe_says_so_and_no_other(tmp_path: Path) -> None:
    write_record(DRIFTED, tmp_path / "drift.json")
    recipe = load_recipe("tiny")
    require_no_drift(recipe, tmp_path)
    with pytest.raises(DriftError, match=r"step speedup 1 lies below 1\.4 to 1\.6\. The report is written"):
        require_no_drift(failing(recipe), tmp_path)
    steady = replace(DRIFTED, findings=(replace(DRIFTED.findings[0], verdict="within"),))
    write_record(steady, tmp_path / "drift.json")
    require_no_drift(failing(recipe), tmp_path)
