"""The MLflow run of a whole execution: what it says at the start, and what it carries at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.drafts.length import DraftLength
from slipstream.losslessness.verdict import LOSSLESS
from slipstream.recipe import Recipe
from slipstream.records.run import DriftRecord, RunRecord
from slipstream.records.stages import CertificateRecord
from slipstream.report.drift import DTYPE_TAG, HARDWARE_TAG, drift_metrics, drift_tags, hardware
from slipstream.report.results import certificate_metrics, description, result_metrics
from slipstream.stages.context import RunContext
from slipstream.stages.origin import execution_url
from slipstream.stages.runs import execution_run
from slipstream.tracking import RunStatus, Tracker, spent
from slipstream.types import Arm

if TYPE_CHECKING:
    from slipstream.report.page import ReportPaths

NOTE = "mlflow.note.content"
"""Tag that MLflow shows as a run's description, in Markdown."""


def started_text(recipe: Recipe, execution: str) -> str:
    """The description of a run that has no result yet."""
    url = execution_url()
    link = f" [The execution in Flyte]({url})." if url else ""
    return f"Recipe {recipe.name}, workload {recipe.workload.value}: execution {execution} goes on.{link}"


def end_execution(context: RunContext, recipe: Recipe, certificate: CertificateRecord) -> None:
    """End the run of an execution that is a certificate alone."""
    tracker = execution_run(context, recipe)
    tracker.log(certificate_metrics(certificate))
    tracker.set_tags({NOTE: f"The engine is {certificate.verdict}: {certificate.reason}"})
    tracker.close(_status(certificate))


def end_reported_execution(
    context: RunContext, recipe: Recipe, record: RunRecord, report: ReportPaths, drift: DriftRecord
) -> None:
    """End the run of an execution with its results, its drift, report and figures."""
    tracker = execution_run(context, recipe)
    _log_results(tracker, context, record)
    tracker.log(drift_metrics(drift))
    tracker.set_tags(drift_tags(drift))
    for path in (report.html, report.json, report.html.with_name("run.json")):
        tracker.log_artifact(path)
    for path in report.figures:
        tracker.log_artifact(path, folder="figures")
    tracker.close(_status(record.certificate))


def _log_results(tracker: Tracker, context: RunContext, record: RunRecord) -> None:
    cost = spent(Path(context.root), context.execution, now_ms=time.time_ns() // 1_000_000)
    metrics = result_metrics(record, hours=cost.hours, gpu_hours=cost.gpu_hours)
    tracker.log(metrics)
    k = _length(record)
    tracker.log_params({"k": k})
    tracker.set_tags(
        {
            "k": k,
            "losslessness": record.certificate.verdict,
            HARDWARE_TAG: hardware(record),
            **({} if record.numerics is None else {DTYPE_TAG: record.numerics.dtype}),
            NOTE: description(record, execution_url=execution_url()),
        }
    )


def _length(record: RunRecord) -> str:
    """What the speculative arm drafted with: a k, or `by_batch`."""
    arm = next((arm for arm in record.arms if arm.arm is Arm.SPECULATIVE), None)
    if arm is None:
        return "0"
    return DraftLength(num_speculative_tokens=arm.num_speculative_tokens, schedule=arm.schedule).label


def _status(certificate: CertificateRecord) -> RunStatus:
    """An execution failed if its speculation was not shown to be lossless."""
    return RunStatus.FINISHED if certificate.verdict == LOSSLESS else RunStatus.FAILED
