"""Reader of the results of executions, from a tracking server or its SQLite file, through MLflow's client."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from slipstream.config import require
from slipstream.tracking.config import is_sqlite, sqlite_path
from slipstream.tracking.mlflow_store import MlflowStore, TrackingError

_TIMEOUT_S = 30  # time-out of a request for a page of executions, each with all metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Run of one workflow execution: last values of its metrics, its parameters and tags."""

    run_id: str
    name: str
    experiment: str
    status: str  # MLflow's: RUNNING, FINISHED, FAILED, KILLED
    start_ms: int
    metrics: dict[str, float] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


def read_executions(uri: str, *, experiment: str | None = None, names: Sequence[str] = ()) -> list[Execution]:
    """Read the executions on the store `uri`, newest first.

    Args:
        experiment: name of the only experiment to read; None: all of them.
        names: names of the only executions to return, in this order; none: all of them.
    Raises:
        ConfigError: `uri` is no server and no SQLite file, or the store lacks the experiment or one of the names.
        TrackingError: the store does not answer.
    """
    store = open_store(uri)
    known = store.experiments()
    chosen = [id_ for id_, name in known.items() if experiment in (None, name)]
    fix = f"known: {', '.join(sorted(known.values()))}"
    require(experiment is None or bool(chosen), "experiment", f"must name an experiment of {uri}", experiment, fix)
    runs = [
        Execution(
            run_id=run.info.run_id,
            name=run.info.run_name or run.info.run_id,
            experiment=known[run.info.experiment_id],
            status=run.info.status,
            start_ms=run.info.start_time,
            metrics=run.data.metrics,
            params=run.data.params,
            tags=run.data.tags,
        )
        for run in (store.executions(chosen) if chosen else ())
    ]
    found = sorted(runs, key=lambda run: (-run.start_ms, run.name))
    if not names:
        return found
    by_name = {run.name: run for run in reversed(found)}  # of two with one name the newer
    for name in names:
        newest = ", ".join(run.name for run in found[:5]) or "none"
        require(name in by_name, "runs", f"must name executions of {uri}", name, f"the newest: {newest}")
    return [by_name[name] for name in names]


def open_store(uri: str) -> MlflowStore:
    """Open the store `uri` for reading: no file is created, and MLflow adds no tables to a foreign one.

    Raises:
        ConfigError: `uri` is no server and no SQLite file.
        TrackingError: the store does not answer.
    """
    if not uri.startswith(("http://", "https://", "databricks")):
        rule = "must be the address of an MLflow server or sqlite:///FILE"
        require(is_sqlite(uri), "uri", rule, uri, "start MLflow's server on that store")
        path = sqlite_path(uri)
        require(path.is_file(), "uri", "must name a store", uri, "no run was tracked there yet")
        try:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
                database.execute("SELECT 1 FROM experiments LIMIT 1")
        except sqlite3.Error as error:
            raise TrackingError(f"tracking store {path}: {error}") from error
    return MlflowStore(uri, request_timeout_s=_TIMEOUT_S)
