"""The MLflow side: find or create runs, send batches. The only file that imports MLflow, and only when used."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slipstream.tracking.config import KEY_TAG
from slipstream.tracking.spool import RunHeader
from slipstream.tracking.views import experiment_tags

if TYPE_CHECKING:
    from mlflow.entities import Metric

T = TypeVar("T")

SQLITE = "sqlite:///"
_MAX_METRICS_A_BATCH = 1000
_MAX_FIELDS_A_BATCH = 100


class TrackingError(RuntimeError):
    """The tracking server did not answer, or refused."""


def import_mlflow(request_timeout_s: int) -> None:
    """Import MLflow (4-8 s once a process) with short requests and without its chatter.

    Done on the caller's thread: importing it on another while this one imports torch can meet half-built modules.
    What the environment says already is left as it is.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # The replay thread tries again by itself, so MLflow's own retries (7, over minutes) would only block it.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(request_timeout_s))
    importlib.import_module("mlflow.tracking")
    for name in ("alembic", "mlflow.store.db.utils", "mlflow.tracking.fluent"):
        logging.getLogger(name).setLevel(logging.WARNING)


class MlflowStore:
    """One tracking server (or SQLite file). Every method raises `TrackingError` when the server does not play along."""

    def __init__(self, uri: str, *, request_timeout_s: int) -> None:
        import_mlflow(request_timeout_s)
        from mlflow.tracking import MlflowClient

        self.uri = uri
        if uri.startswith(SQLITE):
            Path(uri.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
        with _translated(uri):
            self._client = MlflowClient(tracking_uri=uri)

    def attach(self, header: RunHeader, *, start_ms: int) -> str:
        """Id of the run with `header.key`: the existing one as it is, or a new one that began at `start_ms`."""
        with _translated(self.uri):
            return self._find_or_create(self._experiment(header.experiment), header.key, start_ms=start_ms)

    def start(self, run_id: str, header: RunHeader) -> None:
        """Set the run running (again), with what the header says of it."""
        with _translated(self.uri):
            tags = dict(header.tags)
            if header.parent_key is not None:
                # A parent whose own spool was not replayed yet is created here; that replay will find it.
                experiment_id = self._experiment(header.experiment)
                tags["mlflow.parentRunId"] = self._find_or_create(experiment_id, header.parent_key, start_ms=None)
            self._client.update_run(run_id, status="RUNNING", name=header.name)
            self._send_tags(run_id, tags)
            self._send_params(run_id, header.params)

    def send_metrics(self, run_id: str, points: Iterable[tuple[str, float, int, int]]) -> None:
        """Send (name, value, time_ms, step) points; what the server has already is not stored twice."""
        from mlflow.entities import Metric

        metrics: Iterator[Metric] = (Metric(*point) for point in points)
        with _translated(self.uri):
            while batch := list(islice(metrics, _MAX_METRICS_A_BATCH)):
                self._client.log_batch(run_id, metrics=batch)

    def send_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Send parameters. MLflow's cannot change: a new value for an old name becomes the tag `changed.<name>`."""
        with _translated(self.uri):
            self._send_params(run_id, params)

    def send_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags, replacing what they were."""
        with _translated(self.uri):
            self._send_tags(run_id, tags)

    def send_artifact(self, run_id: str, path: Path, *, folder: str) -> None:
        """Upload one file into `folder` of the run's artifacts; empty is the top."""
        with _translated(self.uri):
            self._client.log_artifact(run_id, str(path), folder or None)

    def fetch_artifact(self, key: str, name: str, directory: Path) -> Path:
        """Download the artifact `name` of the run with `key` into `directory`; its path there.

        Raises:
            TrackingError: no run of the server has that key, or the run has no such artifact.
        """
        with _translated(self.uri):
            experiments = [experiment.experiment_id for experiment in self._client.search_experiments()]
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
        if found is not None:
            self._offer_views(found.experiment_id, found.tags)
            return found.experiment_id
        location = None
        if self.uri.startswith(SQLITE):
            location = (Path(self.uri.removeprefix(SQLITE)).parent / "artifacts").as_uri()
        try:
            created = self._client.create_experiment(name, artifact_location=location)
        except MlflowException:
            # Another task of this execution may have been quicker; if not, the first error was the real one.
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return found.experiment_id
        self._offer_views(created, {})
        return created

    def _offer_views(self, experiment_id: str, known: Mapping[str, str]) -> None:
        """Columns and filters that make the experiment's table of runs readable; what somebody changed stays."""
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

    def _find_or_create(self, experiment_id: str, key: str, *, start_ms: int | None) -> str:
        existing = self._find(experiment_id, key)
        if existing is not None:
            return existing
        created = self._client.create_run(experiment_id, start_time=start_ms, tags={KEY_TAG: key}, run_name=key)
        # MLflow knows no unique key. Of two tasks that create at the same moment, both keep the older run.
        kept = self._find(experiment_id, key)
        if kept is not None and kept != created.info.run_id:
            self._client.delete_run(created.info.run_id)
        return kept or created.info.run_id

    def _find(self, experiment_id: str, key: str) -> str | None:
        runs = self._client.search_runs([experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{key}'")
        runs = sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))
        return runs[0].info.run_id if runs else None

    def _send_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        for batch in _batches(list(tags.items())):
            self._client.log_batch(run_id, tags=[RunTag(*tag) for tag in batch])

    def _send_params(self, run_id: str, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(run_id).data.params if params else {}
        for batch in _batches([(name, value) for name, value in params.items() if name not in known]):
            self._client.log_batch(run_id, params=[Param(*param) for param in batch])
        changed = {name: value for name, value in params.items() if known.get(name, value) != value}
        self._send_tags(run_id, {f"changed.{name}": value for name, value in changed.items()})


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _MAX_FIELDS_A_BATCH):
        yield items[start : start + _MAX_FIELDS_A_BATCH]


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Turn what MLflow, its HTTP client (an OSError) and its database raise into one error that names the server."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, OSError, SQLAlchemyError) as error:
        raise TrackingError(f"tracking server {uri}: {error}") from error
