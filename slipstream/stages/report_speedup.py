"""Combine the records of a run in one page, with its drift from earlier runs."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.config import ConfigError
from slipstream.data.prompts import read_prompt_sets
from slipstream.recipe import Recipe, parameters
from slipstream.records.files import read_record, write_record
from slipstream.records.run import DriftRecord, RunRecord
from slipstream.records.stages import CertificateRecord, DraftRecord, PolicyRecord, TuningRecord
from slipstream.records.steps import ArmRecord, EvaluationRecord, by_loop
from slipstream.report.drift import find_drift, setting_tags
from slipstream.report.page import write_report
from slipstream.report.results import curve_metrics, result_metrics
from slipstream.report.summary import summarise
from slipstream.simulator.projection import ProjectionRecord
from slipstream.stages.context import RunContext
from slipstream.stages.runs import end_reported_execution, experiment_name, tracked
from slipstream.stages.support import numerics, recipe_layout, settled, versions
from slipstream.tracking.config import fitted, store_uri
from slipstream.tracking.mlflow_store import Execution, TrackingError, read_executions
from slipstream.types import Arms
from slipstream.workers.session import machine

logger = logging.getLogger(__name__)

DRIFT_FILE = "drift.json"


class DriftError(RuntimeError):
    """Results of an execution left the bands of the executions before it."""


def report_speedup(  # noqa: PLR0913  # one input a record
    context: RunContext,
    recipe: Recipe,
    *,
    policy: Path,
    data: Path,
    draft: Path | None,
    tuning: Path | None,
    arms: list[Path],
    evaluations: list[Path],
    certificate: Path | None,
    projection: Path,
) -> Path:
    """Write report.html and three JSON files, and link their directory as runs/latest; return that directory.

    Args:
        draft: None, as tuning and certificate, without a speculative arm.
        arms: directories of the arms in every loop of the run, in any order.
    """
    directory = context.directory("report_speedup")
    trained, asynchronous = by_loop(read_record(ArmRecord, arm / "arm.json") for arm in arms)
    record = RunRecord(
        recipe=recipe.name,
        workload=recipe.workload.value,
        execution=context.execution,
        tracking_uri=store_uri(recipe.tracking, Path(context.root)),
        versions=next((arm.versions for arm in trained if arm.versions), None) or versions(),
        machine=next((arm.machine for arm in trained if arm.machine), None) or machine(),
        policy=read_record(PolicyRecord, policy / "policy.json"),
        data=read_prompt_sets(data).records,
        draft=None if draft is None else read_record(DraftRecord, draft / "draft.json"),
        tuning=None if tuning is None else read_record(TuningRecord, tuning / "tuning.json"),
        arms=trained,
        evaluations=tuple(read_record(EvaluationRecord, path / "evaluation.json") for path in evaluations),
        certificate=None if certificate is None else read_record(CertificateRecord, certificate / "certificate.json"),
        numerics=numerics(context, recipe),
        logical_gpus=recipe.placement.logical_gpus,
        layout=recipe_layout(settled(context, recipe)),
        asynchronous=asynchronous,
        requested=Arms(context.arms),
    )
    with tracked(context, recipe, "report_speedup") as tracker:
        write_record(record, directory / "run.json")
        projected = read_record(ProjectionRecord, projection / "projection.json")
        drift = drift_of(context, recipe, record)
        write_record(drift, directory / DRIFT_FILE)
        write_report(record, directory, projection=projected, drift=drift)
        if record.numerics is not None:
            tracker.log_params({"dtype": record.numerics.dtype, "dtype_reason": record.numerics.reason})
        speedup = summarise(record)["speedup"]
        tracker.log({f"speedup/{name}": value["value"] for name, value in speedup.items() if value["value"]})
        for step, metrics in curve_metrics(record):
            tracker.log(metrics, step)
        for name in ("report.html", "report.json", "run.json", DRIFT_FILE):
            tracker.log_artifact(directory / name)
    end_reported_execution(context, recipe, record, directory, drift)
    _link_latest(Path(context.root), directory)
    return directory


def _link_latest(root: Path, directory: Path) -> None:
    """Point `<root>/latest` at this run's report, with a link that holds wherever the root is moved."""
    # The name is this execution's: another may end at the same moment.
    link, temporary = root / "latest", root / f".latest.{directory.parent.name}.part"
    if link.is_dir() and not link.is_symlink():
        logger.warning("report_speedup: %s is a directory, not our link, and is left alone", link)
        return
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(directory.relative_to(root))
    temporary.replace(link)


def drift_of(context: RunContext, recipe: Recipe, record: RunRecord) -> DriftRecord:
    """Compare with the executions on the tracking store; the drift is unknown if the store cannot be read."""
    uri = store_uri(recipe.tracking, Path(context.root))
    try:
        executions = read_executions(uri, experiment=experiment_name(recipe))
    except (ConfigError, TrackingError) as error:
        logger.warning("drift is unknown: %s", error)
        return DriftRecord(summary=f"Unknown, for the executions before could not be read: {error}")
    subject = Execution(
        name=context.execution,
        metrics=result_metrics(record, hours=0.0, gpu_hours=0.0),
        params=fitted("param", {**parameters(recipe), "arms": context.arms}),  # as the others' were stored
        tags={"workload": record.workload, **setting_tags(record)},
    )
    drift = find_drift(subject, executions, recipe.tracking.drift)
    logger.log(logging.WARNING if drift.outside else logging.INFO, "%s", drift.summary)
    return drift


def require_no_drift(recipe: Recipe, report: Path) -> None:
    """Raise a `DriftError` if results of a report drifted and the recipe makes that an error."""
    drift = read_record(DriftRecord, report / DRIFT_FILE)
    if drift.outside and recipe.tracking.drift.fail:
        raise DriftError(f"{drift.summary} The report is written; tracking.drift.fail makes this an error")
