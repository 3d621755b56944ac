"""Access to MLflow: find or create runs, send batches, read executions.

This file alone imports MLflow, and only when it is used.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import shlex
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.config import require
from slipstream.tracking.config import EXECUTION, KEY_TAG, KIND_TAG, check_key, is_sqlite, sqlite_path, sqlite_uri
from slipstream.tracking.spool import RunHeader

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

T = TypeVar("T")
Point = tuple[str, float, int, int]
"""Name, value, time in milliseconds, and step of a metric."""

_PAGE = 1000
_TIMEOUT_S = 30  # time-out of a request for a page of executions, each with all metrics
_MAX_METRICS_A_BATCH = 1000
_MAX_FIELDS_A_BATCH = 10  # of <= 8,000 characters: a server takes 1 MB of JSON, in which a character can be 12 bytes


# Views of an experiment in MLflow's own interface: which runs its table shows, and with which columns. The table shows
# neither metrics nor parameters by itself. MLflow keeps shared views as tags of the experiment, named
# `mlflow.sharedViewState.<key>`, and opens one at `#/experiments/<id>/runs?viewStateShareKey=<key>`.
# Source: mlflow 3.17, `useSharedExperimentViewState` of its interface.
_VIEWS = {  # name: (filter of runs, parameters, metrics)
    "executions": (
        f"tags.`{KIND_TAG}` = '{EXECUTION}'",
        ("workload", "draft.method", "grpo.seed"),
        (
            "result/generation_speedup",
            "result/step_speedup",
            "result/reward_autoregressive",
            "result/reward_speculative",
            "result/reward_difference",
            "result/mean_acceptance_length",
            "result/lossless",
            "result/hours",
        ),
    ),
    "arms": (
        "params.arm LIKE '%'",
        ("arm", "loop", "max_off_policy_steps", "k", "draft.method", "grpo.seed"),
        ("mean/generation_s", "mean/step_s", "mean/reward", "mean/mean_acceptance_length"),
    ),
}


class TrackingError(RuntimeError):
    """The tracking server did not answer, or refused."""


def import_mlflow(request_timeout_s: int = 10) -> None:
    """Import MLflow (4-8 s once a process) with short requests and without its chatter.

    The import runs on the caller's thread: beside an import of torch on another thread it can meet half-built modules.
    Values that the environment has already are kept.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # The replay thread tries again by itself, so MLflow's own retries (7, over minutes) would only block it.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(request_timeout_s))
    importlib.import_module("mlflow.tracking")
    for name in ("alembic", "mlflow.tracking.fluent"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs the traces of errors that it raises


class MlflowStore:
    """One tracking server or SQLite file. Every method raises `TrackingError` when the server fails or refuses."""

    def __init__(self, uri: str, *, request_timeout_s: int = 10) -> None:
        import_mlflow(request_timeout_s)
        self.uri = uri
        with _translated(uri):
            if is_sqlite(uri):
                _create_sqlite(sqlite_path(uri).absolute())
            self._client = _open(uri)

    def check(self) -> None:
        """Send the server a request that costs it nothing."""
        with _translated(self.uri):
            self._client.search_experiments(max_results=1)

    def attach(self, header: RunHeader, *, start_ms: int) -> str:
        """Id of the run with `header.key`: the existing run as it is, or a new one that began at `start_ms`.

        Raises:
            TrackingError: somebody deleted the run on the server; a second one would take the place of what is
                restored later.
        """
        with _translated(self.uri):
            run = self._find_or_create(self._experiment(header.experiment), header.key, start_ms=start_ms)
            if run.info.lifecycle_stage == "deleted":
                restore = self._mlflow("runs", "restore", "--run-id", run.info.run_id)
                raise TrackingError(f"run {header.key} was deleted on {self.uri}; restore it with: {restore}")
            return run.info.run_id

    def start(self, run_id: str, header: RunHeader) -> None:
        """Set the run running (again), with the tags and parameters of its header."""
        with _translated(self.uri):
            tags = dict(header.tags)
            if header.parent_key is not None:
                # A parent whose own spool was not replayed yet is created here; that replay will find it.
                experiment_id = self._experiment(header.experiment)
                parent = self._find_or_create(experiment_id, header.parent_key, start_ms=None)
                tags["mlflow.parentRunId"] = parent.info.run_id
            self._client.update_run(run_id, status="RUNNING", name=header.name)
            self.send_tags(run_id, tags)
            self.send_params(run_id, header.params)

    def send_metrics(self, run_id: str, points: Iterable[Point]) -> None:
        """Send points; the server stores a repeated one once."""
        from mlflow.entities import Metric

        with _translated(self.uri):
            for batch in _batches(points, _MAX_METRICS_A_BATCH):
                self._client.log_batch(run_id, metrics=[Metric(*point) for point in batch])

    def send_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Send parameters. MLflow's cannot change: a new value for an old name becomes the tag `changed.<name>`."""
        from mlflow.entities import Param

        with _translated(self.uri):
            known = self._client.get_run(run_id).data.params if params else {}
            new = [(name, value) for name, value in params.items() if name not in known]
            for batch in _batches(new, _MAX_FIELDS_A_BATCH):
                self._client.log_batch(run_id, params=[Param(*param) for param in batch])
        changed = {name: value for name, value in params.items() if known.get(name, value) != value}
        self.send_tags(run_id, {f"changed.{name}": value for name, value in changed.items()})

    def send_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags, and replace earlier values."""
        from mlflow.entities import RunTag

        with _translated(self.uri):
            for batch in _batches(tags.items(), _MAX_FIELDS_A_BATCH):
                self._client.log_batch(run_id, tags=[RunTag(*tag) for tag in batch])

    def send_artifact(self, run_id: str, path: Path, *, folder: str) -> None:
        """Upload one file into `folder` of the run's artifacts; empty is the top."""
        with _translated(self.uri):
            self._client.log_artifact(run_id, str(path), folder or None)

    def experiments(self) -> dict[str, str]:
        """Name of each experiment by its id."""
        with _translated(self.uri):
            return {each.experiment_id: each.name for each in _pages(self._client.search_experiments)}

    def run_route(self, experiment: str, key: str) -> str:
        """Address of a run below the server's own, by the name of its experiment and its key; empty without one."""
        with _translated(self.uri):
            named = self._client.get_experiment_by_name(experiment)
            run = None if named is None else self._find(named.experiment_id, key)
        return "" if run is None else f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"

    def executions(self, experiment_ids: list[str]) -> list[Run]:
        """Runs of whole executions in these experiments; about 40 times as many runs of tasks lie beside them."""
        search = partial(self._client.search_runs, experiment_ids, f"tags.`{KIND_TAG}` = '{EXECUTION}'")
        with _translated(self.uri):
            return list(_pages(search))

    def fetch_artifact(self, key: str, name: str, directory: Path) -> Path:
        """Download the artifact `name` of the run with `key` into `directory`; return its path.

        Raises:
            ConfigError: `key` could not be a key.
            TrackingError: no run of the server has that key, or the run has no such artifact.
        """
        check_key(key)
        experiments = list(self.experiments())
        with _translated(self.uri):
            runs = self._client.search_runs(experiments, filter_string=f"tags.`{KEY_TAG}` = '{key}'")
            if not runs:
                raise TrackingError(f"tracking server {self.uri}: no run has the key {key!r}")
            run_id = runs[0].info.run_id
            if name not in {artifact.path for artifact in self._client.list_artifacts(run_id)}:
                raise TrackingError(f"tracking server {self.uri}: run {key!r} has no artifact {name!r}")
            return Path(self._client.download_artifacts(run_id, name, str(directory)))

    def end(self, run_id: str, *, status: str, time_ms: int) -> None:
        """Mark the run as ended at `time_ms`."""
        with _translated(self.uri):
            self._client.set_terminated(run_id, status=status, end_time=time_ms)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            is_file, store = is_sqlite(self.uri), sqlite_path(self.uri).absolute()
            location = (store.parent / "artifacts").as_uri() if is_file else None
            try:
                self._client.create_experiment(name, artifact_location=location)
            except MlflowException:
                # Another task of this execution may have been quicker; if not, the first error was the real one.
                if self._client.get_experiment_by_name(name) is None:
                    raise
            found = self._client.get_experiment_by_name(name)
            assert found is not None
        if found.lifecycle_stage == "deleted":
            restore = self._mlflow("experiments", "restore", "--experiment-id", found.experiment_id)
            raise TrackingError(f"experiment {name} was deleted on {self.uri}; restore it with: {restore}")
        self._offer_views(found.experiment_id, found.tags)
        return found.experiment_id

    def _offer_views(self, experiment_id: str, known: Mapping[str, str]) -> None:
        """Add columns and filters that make the experiment's table of runs readable; changed views stay."""
        from mlflow.exceptions import MlflowException

        for name, value in experiment_tags(experiment_id).items():
            if name in known:
                continue
            try:
                self._client.set_experiment_tag(experiment_id, name, value)
            except MlflowException:
                # Another task may have set it at the same moment; if not, the first error was the real one.
                if name not in self._client.get_experiment(experiment_id).tags:
                    raise

    def _find_or_create(self, experiment_id: str, key: str, *, start_ms: int | None) -> Run:
        existing = self._find(experiment_id, key)
        if existing is not None:
            return existing
        created = self._client.create_run(experiment_id, start_time=start_ms, tags={KEY_TAG: key}, run_name=key)
        # MLflow knows no unique key. Of two tasks that create at the same moment, both keep the older run.
        kept = self._find(experiment_id, key)
        if kept is not None and kept.info.run_id != created.info.run_id:
            self._client.delete_run(created.info.run_id)
        return kept or created

    def _find(self, experiment_id: str, key: str) -> Run | None:
        """Oldest run with that key; a deleted one only if all are deleted."""
        from mlflow.entities import ViewType

        asked = f"tags.`{KEY_TAG}` = '{key}'"
        runs = self._client.search_runs([experiment_id], filter_string=asked, run_view_type=ViewType.ALL)
        return min(
            runs,
            key=lambda run: (run.info.lifecycle_stage == "deleted", run.info.start_time, run.info.run_id),
            default=None,
        )

    def _mlflow(self, *arguments: str) -> str:
        """Command line of MLflow for this server."""
        return f"MLFLOW_TRACKING_URI={shlex.quote(self.uri)} {shlex.join(['mlflow', *arguments])}"


def view_addresses(server: str, experiment_id: str) -> dict[str, str]:
    """Address of each view on the server."""
    return {view: f"{server.rstrip('/')}/{_route(experiment_id, view)}" for view in _VIEWS}


def experiment_tags(experiment_id: str) -> dict[str, str]:
    """Tags that make an experiment readable in MLflow's interface: its two views, and a description that links them."""
    executions, arms = (_route(experiment_id, view) for view in _VIEWS)
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": (
            f"Each execution is a run with the runs of its tasks below it. [Executions side by side]({executions}): "
            f"speedups, rewards, cost. [Arms side by side]({arms}): one run an arm, for curves over steps."
        ),
        **{f"mlflow.sharedViewState.{view}": _view(*shown) for view, shown in _VIEWS.items()},
    }


def _route(experiment_id: str, view: str) -> str:
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={view}"


def _view(search_filter: str, params: Sequence[str], metrics: Sequence[str]) -> str:
    columns = ["attributes.`Duration`", *(f"params.`{name}`" for name in params)]
    columns += [f"metrics.`{name}`" for name in metrics]
    # Sorted by anything but the start, the table does not fold runs below their parents.
    order = {"orderByKey": "tags.`mlflow.runName`", "orderByAsc": True}
    return json.dumps({"searchFilter": search_filter, "selectedColumns": columns, **order})


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _pages(search: Callable[..., Any]) -> Iterator[Any]:
    """Yield everything that a search of MLflow's client finds, page after page."""
    token: str | None = None
    while True:
        page = search(max_results=_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _open(uri: str) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _create_sqlite(path: Path) -> None:
    """Create the store `path` unless it exists, whole or not at all.

    MLflow makes its tables in about 50 steps that no two processes may take at once, and that it cannot resume after a
    process was killed. So one process takes them, in a file beside `path` that is then moved to its place.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or this process ends
        if path.exists():
            return
        made = path.with_name(f"{path.name}.new")
        for left in (made, made.with_name(f"{made.name}-journal")):  # left by a process that was killed
            left.unlink(missing_ok=True)
        _open(sqlite_uri(made))
        made.replace(path)


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Turn whatever MLflow and the layers below it (HTTP client, database, a missing driver) raise into one error.

    The error names the server, and gives the reason on one line.
    """
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        raise TrackingError(f"tracking server {uri}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """First line of an error, since a database adds its statement; of a failed connection, its root cause."""
    said: BaseException = error
    below = error.__cause__ or error.__context__
    if isinstance(below, OSError):  # the HTTP client's error and its root cause both are
        while below is not None:
            said = below if isinstance(below, OSError) else said
            below = below.__cause__ or below.__context__
    return next(iter(str(said).strip().splitlines()), type(said).__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Run of one workflow execution: last values of its metrics, its parameters and tags."""

    name: str
    run_id: str = ""  # empty before it is tracked
    status: str = "RUNNING"  # MLflow's: RUNNING, FINISHED, FAILED, KILLED
    start_ms: int = 0
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
            name=run.info.run_name or run.info.run_id,
            run_id=run.info.run_id,
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
