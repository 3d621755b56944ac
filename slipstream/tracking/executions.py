"""Read back what executions came to, from a tracking server or its SQLite file, without importing MLflow.

Importing MLflow takes longer than everything else here (4-8 s), so a server is asked through MLflow's REST API and a
SQLite file through its tables.
Source: MLflow 3.17, REST API 2.0 (`experiments/search`, `runs/search`) and `mlflow.store.tracking.dbmodels`.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slipstream.config import require
from slipstream.tracking.config import EXECUTION, KIND_TAG, existing_sqlite, is_sqlite
from slipstream.tracking.mlflow_store import TrackingError

_PAGE = 1000
_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """The run of one workflow execution: last values of its metrics, its parameters and tags."""

    run_id: str
    name: str
    experiment: str
    status: str  # MLflow's: RUNNING, FINISHED, FAILED, KILLED
    start_ms: int
    metrics: dict[str, float] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class _Source(Protocol):
    def experiments(self) -> dict[str, str]:
        """Name of each experiment by its id."""
        ...

    def executions(self, experiments: Mapping[str, str]) -> list[Execution]:
        """The executions of these experiments, in any order."""
        ...


def read_executions(uri: str, *, experiment: str | None = None, names: Sequence[str] = ()) -> list[Execution]:
    """The executions on the store `uri`, newest first.

    Args:
        experiment: of this experiment alone.
        names: these alone, in this order.
    Raises:
        ConfigError: `uri` is no server and no SQLite file, or the store lacks the experiment or one of the names.
        TrackingError: the store does not answer.
    """
    source = _source(uri)
    known = source.experiments()
    chosen = known
    if experiment is not None:
        chosen = {id_: name for id_, name in known.items() if name == experiment}
        fix = f"known: {', '.join(sorted(known.values()))}"
        require(bool(chosen), "experiment", f"must name an experiment of {uri}", experiment, fix)
    found = sorted(source.executions(chosen), key=lambda run: (-run.start_ms, run.name))
    if not names:
        return found
    by_name = {run.name: run for run in reversed(found)}  # of two with one name the newer
    for name in names:
        newest = ", ".join(run.name for run in found[:5]) or "none"
        require(name in by_name, "runs", f"must name executions of {uri}", name, f"the newest: {newest}")
    return [by_name[name] for name in names]


def experiment_names(uri: str) -> dict[str, str]:
    """Name of each experiment of the store `uri` by its id.

    Raises:
        ConfigError, TrackingError: as `read_executions`.
    """
    return _source(uri).experiments()


def _source(uri: str) -> _Source:
    if uri.startswith(("http://", "https://")):
        return _Server(uri)
    rule = "must be the address of an MLflow server or sqlite:///FILE"
    require(is_sqlite(uri), "uri", rule, uri, "start MLflow's server on that store")
    return _SqliteFile(existing_sqlite(uri))


class _Server:
    """MLflow's REST API."""

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")

    def experiments(self) -> dict[str, str]:
        found = self._pages("experiments/search", "experiments", {})
        with self._as_documented():
            return {item["experiment_id"]: item["name"] for item in found}

    def executions(self, experiments: Mapping[str, str]) -> list[Execution]:
        asked = {"experiment_ids": list(experiments), "filter": f"tags.`{KIND_TAG}` = '{EXECUTION}'"}
        with self._as_documented():
            return [_from_json(run, experiments) for run in self._pages("runs/search", "runs", asked)]

    @contextmanager
    def _as_documented(self) -> Iterator[None]:
        """Refuse an answer that is JSON of another kind: of a proxy, or of another service at this address."""
        try:
            yield
        except (AttributeError, KeyError, TypeError) as error:
            raise TrackingError(f"tracking server {self._uri}: no answer of MLflow's: {error!r}") from error

    def _pages(self, route: str, name: str, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        token: str | None = None
        while True:
            page = self._post(route, {**asked, "max_results": _PAGE, **({"page_token": token} if token else {})})
            yield from page.get(name, ())
            token = page.get("next_page_token")
            if not token:
                return

    def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", **_authorization(os.environ)}
        url = f"{self._uri}/api/2.0/mlflow/{route}"
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return json.load(answer)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise TrackingError(f"tracking server {self._uri}: {route}: {error}") from error


def _authorization(environment: Mapping[str, str]) -> dict[str, str]:
    """What MLflow's own client would send: its variables are the same."""
    token = environment.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"Authorization": f"Bearer {token}"}
    user, password = environment.get("MLFLOW_TRACKING_USERNAME"), environment.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {}


def _from_json(run: Mapping[str, Any], experiments: Mapping[str, str]) -> Execution:
    info, data = run["info"], run["data"]
    return Execution(
        run_id=info["run_id"],
        name=info["run_name"],
        experiment=experiments[info["experiment_id"]],
        status=info["status"],
        start_ms=int(info["start_time"]),
        metrics={item["key"]: float(item["value"]) for item in data.get("metrics", ())},
        params={item["key"]: item["value"] for item in data.get("params", ())},
        tags={item["key"]: item["value"] for item in data.get("tags", ())},
    )


class _SqliteFile:
    """The tables of MLflow's SQLite store, opened for reading alone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def experiments(self) -> dict[str, str]:
        with self._open() as database:
            found = database.execute("SELECT experiment_id, name FROM experiments WHERE lifecycle_stage = 'active'")
            return {str(id_): name for id_, name in found}

    def executions(self, experiments: Mapping[str, str]) -> list[Execution]:
        query = (
            "SELECT run_uuid, name, experiment_id, status, start_time FROM runs JOIN tags USING (run_uuid) "
            "WHERE tags.key = ? AND tags.value = ? AND lifecycle_stage = 'active'"
        )
        with self._open() as database:
            rows = database.execute(query, (KIND_TAG, EXECUTION)).fetchall()
            runs = {
                run_id: Execution(
                    run_id=run_id, name=name, experiment=experiments[str(of)], status=status, start_ms=start_ms
                )
                for run_id, name, of, status, start_ms in rows
                if str(of) in experiments
            }
            for run_id, key, value in _values(database, "latest_metrics"):
                if run_id in runs:
                    runs[run_id].metrics[key] = float(value)
            for run_id, key, value in _values(database, "params"):
                if run_id in runs:
                    runs[run_id].params[key] = value
            for run_id, key, value in _values(database, "tags"):
                if run_id in runs:
                    runs[run_id].tags[key] = value
        return list(runs.values())

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True)) as database:
                yield database
        except sqlite3.Error as error:
            raise TrackingError(f"tracking store {self._path}: {error}") from error


def _values(database: sqlite3.Connection, table: str) -> Iterable[tuple[str, str, Any]]:
    """The rows of the executions' runs alone: a store has 40 times as many others."""
    return database.execute(
        f"SELECT t.run_uuid, t.key, t.value FROM {table} t JOIN tags k ON k.run_uuid = t.run_uuid "
        "WHERE k.key = ? AND k.value = ?",
        (KIND_TAG, EXECUTION),
    )
