"""Tracker that tasks and the training loop log to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from slipstream.config import require
from slipstream.records.files import write_atomic
from slipstream.tracking.config import TrackingConfig, check_key, check_metrics, fitted, store_uri
from slipstream.tracking.mlflow_store import MlflowStore, TrackingError, import_mlflow
from slipstream.tracking.replay import SpoolReplay, not_arrived, replay_command
from slipstream.tracking.spool import Event, RunHeader, RunStatus, Spool, now_ms, read_events, spool_path

log = logging.getLogger(__name__)

# MLflow's compare view shows last values only, so the best and the mean over steps are logged as values of their own.
_SUMMARISED = {"time/step_s": min, "time/generation_s": min, "train/reward": max, "spec/mean_acceptance_length": max}
_MAX_BACKOFF_S = 60.0
_LAST_PAUSES_S = (0.3, 0.6, 0.0)  # between the last tries: a failure may be momentary
_KILLED_WAIT_S = 1.0
_SILENT = "no answer yet"


class Tracker:
    """One MLflow run. Logging appends to a spool and returns; a daemon thread brings the spool to the server.

    As a context manager it ends the run as finished, failed (an exception) or killed (an interrupt).
    """

    def __init__(
        self,
        config: TrackingConfig,
        *,
        root: Path,
        experiment: str,
        key: str,
        name: str,
        parent_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, str | float | bool] | None = None,
    ) -> None:
        """Create the run `key`, or re-attach to it if an earlier attempt created it; this works without a server.

        The first call in a process imports MLflow (4-8 s).

        Args:
            root: directory of the spool and, when the config names no server, of the SQLite store.
            experiment: name of the recipe, used unless the config names an experiment.
            key: `<execution>/<node>`, by which every attempt finds the run.
            parent_key: key of the run that this one is shown under.
            tags, params: longer values than MLflow stores are cut, and say so.
        Raises:
            ConfigError: `key` could not stand in a search filter, or a tag or parameter has a name that MLflow refuses.
        """
        check_key(key)
        header = RunHeader(
            experiment=config.experiment or experiment,
            key=key,
            name=name,
            parent_key=parent_key,
            tags=fitted("tag", tags or {}),
            params=fitted("param", params or {}),
        )
        self._config = config
        self._spool = Spool(spool_path(root, experiment=header.experiment, key=key))
        self._spool.append(Event(kind="open", time_ms=now_ms(), header=header))
        import_mlflow()
        command = replay_command(root, config.uri)
        self._thread = _ReplayThread(self._spool, uri=store_uri(config, root), config=config, command=command)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one value a metric for `step`, at the present time; this costs one write to the page cache.

        Args:
            step: an attempt that repeats steps of an earlier one adds no second point for them; None is a result of
                the whole run, for which the last attempt's value stands.
        Raises:
            ConfigError: a name is not `area/name` or a value is not finite.
        """
        check_metrics(metrics, step or 0)
        values = {name: float(value) for name, value in metrics.items()}
        event = Event(kind="metrics", time_ms=now_ms(), step=step or 0, is_result=step is None, metrics=values)
        self._spool.append(event)

    def log_params(self, params: Mapping[str, str | float | bool]) -> None:
        """Log parameters, one a setting, as they are compared by value; a longer text than MLflow stores is cut."""
        self._spool.append(Event(kind="params", time_ms=now_ms(), fields=fitted("param", params)))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags, and replace earlier values; a longer text than MLflow stores is cut."""
        self._spool.append(Event(kind="tags", time_ms=now_ms(), fields=fitted("tag", tags)))

    def log_artifact(self, path: Path, *, folder: str = "") -> None:
        """Log one file as it is now, for `folder` of the run's artifacts; the original may change or vanish."""
        require(path.is_file(), "artifact", "must be a file", str(path))
        copy = self._spool.path.with_suffix(".artifacts") / folder / path.name
        write_atomic(copy, path.read_bytes())  # an earlier copy that was not sent yet is never replaced by half a file
        relative = copy.relative_to(self._spool.path.parent)
        self._spool.append(Event(kind="artifact", time_ms=now_ms(), path=str(relative), folder=folder))

    def close(self, status: RunStatus = RunStatus.FINISHED) -> None:
        """Log the `best/` and `mean/` summaries, end the run, and wait a little for the last points to arrive.

        Somebody waits for a killed run to end, so its wait is short; points that do not arrive stay in the spool.
        """
        summaries, last_step = _summaries(self._spool.path)
        if summaries:
            event = Event(kind="metrics", time_ms=now_ms(), step=last_step, is_result=True, metrics=summaries)
            self._spool.append(event)
        self._spool.append(Event(kind="end", time_ms=now_ms(), status=status.value))
        wait_s = self._config.close_wait_s
        self._release(min(wait_s, _KILLED_WAIT_S) if status is RunStatus.KILLED else wait_s)

    def detach(self) -> None:
        """Release the run without ending it: another task will attach to it."""
        self._release(self._config.close_wait_s)

    def _release(self, wait_s: float) -> None:
        self._spool.sync()
        self._thread.finish(wait_s)
        self._spool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(RunStatus.FINISHED if kind is None else RunStatus.of_error(kind))


class _ReplayThread(threading.Thread):
    """Replay of one spool until `finish`. Only this thread talks to MLflow, so only it waits for a hung server."""

    def __init__(self, spool: Spool, *, uri: str, config: TrackingConfig, command: str) -> None:
        super().__init__(name=f"replay {spool.path.name}", daemon=True)
        self._spool = spool
        self._uri = uri
        self._config = config
        self._command = command  # command that sends what does not arrive
        self._finishing = threading.Event()
        self._arrived = threading.Event()
        self._replay: SpoolReplay | None = None
        self._num_failures, self._failure = 0, _SILENT

    def run(self) -> None:
        """Replay and pause until `finish`; then replay once more, or a few times if that fails."""
        while not self._finishing.is_set():
            self._try()
            self._finishing.wait(self._pause_s())
        for pause_s in _LAST_PAUSES_S:
            if self._try():
                self._arrived.set()
                return
            time.sleep(pause_s)

    def finish(self, wait_s: float) -> None:
        """Replay the rest for at most `wait_s`; points that do not arrive stay in the spool."""
        self._finishing.set()
        self.join(wait_s)
        if not self._arrived.is_set():
            missing = not_arrived(self._spool.path, self._uri) or "some points"
            safe = f"they are safe in {self._spool.path}"
            where = f"{self._uri} ({self._failure})"
            log.warning("%s have not reached %s; %s, and this brings them: %s", missing, where, safe, self._command)

    def _try(self) -> bool:
        """Send the rest of the spool; return True if all of it has arrived."""
        try:
            self._spool.sync()
            if self._replay is None:
                self._replay = SpoolReplay(self._spool.path, MlflowStore(self._uri))
            while self._replay.advance():
                pass
        except Exception as error:  # noqa: BLE001  # whatever it is, this thread must live to try again
            self._failure = str(error) if isinstance(error, TrackingError) else f"{type(error).__name__}: {error}"
            if self._num_failures == 0:
                log.warning("%s; training goes on and points wait in %s", self._failure, self._spool.path)
            self._num_failures += 1
        else:
            if self._num_failures:
                log.info("tracking server %s answers again; %s has arrived", self._uri, self._spool.path)
            self._num_failures, self._failure = 0, _SILENT
        return self._num_failures == 0

    def _pause_s(self) -> float:
        """Seconds to wait for further events: longer after each failure."""
        every_s = self._config.replay_every_s
        return min(every_s * 2 ** min(self._num_failures, 10), max(_MAX_BACKOFF_S, every_s))


def _summaries(path: Path) -> tuple[dict[str, float], int]:
    """Summaries `best/` and `mean/` of the chosen metrics over all attempts of a run, with the last step.

    A resumed run repeats the steps after its checkpoint: the later value of a step counts.
    """
    by_step: dict[str, dict[int, float]] = {}
    last_step = 0
    for event in read_events(path):
        for name in event.metrics.keys() & _SUMMARISED.keys():
            by_step.setdefault(name, {})[event.step] = event.metrics[name]
            last_step = max(last_step, event.step)
    summaries: dict[str, float] = {}
    for name, values in by_step.items():
        short = name.partition("/")[2]
        summaries[f"best/{short}"] = _SUMMARISED[name](values.values())
        summaries[f"mean/{short}"] = sum(values.values()) / len(values)
    return summaries, last_step
