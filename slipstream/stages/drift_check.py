"""Drift of an execution from those before it: a part of its report, and a reason to fail once that is written."""

from __future__ import annotations

import logging
from pathlib import Path

from slipstream.config import ConfigError
from slipstream.recipe import Recipe, parameters
from slipstream.records.files import read_record
from slipstream.records.run import DriftRecord, RunRecord
from slipstream.report.drift import Subject, find_drift, hardware
from slipstream.report.results import result_metrics
from slipstream.stages.context import RunContext
from slipstream.stages.runs import experiment_name
from slipstream.tracking.config import store_uri
from slipstream.tracking.executions import read_executions
from slipstream.tracking.mlflow_store import TrackingError

logger = logging.getLogger(__name__)

DRIFT_FILE = "drift.json"


class DriftError(RuntimeError):
    """Results of an execution left the bands of the executions before it."""


def drift_of(context: RunContext, recipe: Recipe, record: RunRecord) -> DriftRecord:
    """Compare with the executions on the tracking store; the drift is unknown if the store cannot be read."""
    uri = store_uri(recipe.tracking, Path(context.root))
    try:
        executions = read_executions(uri, experiment=experiment_name(context, recipe))
    except (ConfigError, TrackingError) as error:
        logger.warning("drift is unknown: %s", error)
        return DriftRecord(summary=f"Unknown, for the executions before could not be read: {error}")
    metrics = result_metrics(record, hours=0.0, gpu_hours=0.0)
    subject = Subject(
        execution=context.execution,
        workload=context.workload,
        hardware=hardware(record),
        dtype=record.numerics.dtype if record.numerics is not None else None,
        params={**parameters(recipe), "arms": context.arms},
        results={name.removeprefix("result/"): value for name, value in metrics.items()},
    )
    drift = find_drift(subject, executions, recipe.tracking.drift)
    logger.log(logging.WARNING if drift.outside else logging.INFO, "%s", drift.summary)
    return drift


def require_no_drift(recipe: Recipe, report: Path) -> DriftRecord:
    """Return the drift of a report; raise if results drifted and the recipe makes that an error.

    Raises:
        DriftError: the message names each result outside its band.
    """
    drift = read_record(DriftRecord, report / DRIFT_FILE)
    if drift.outside and recipe.tracking.drift.fail:
        raise DriftError(f"{drift.summary} The report is written; tracking.drift.fail makes this an error")
    return drift
