"""Replay of spools to a tracking server: with the original times, each point once, as often as it takes."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from slipstream.config import ConfigError, require
from slipstream.records.files import is_torn, read_record, write_record
from slipstream.tracking.mlflow_store import MlflowStore, Point, TrackingError
from slipstream.tracking.spool import Event, read_events, read_spool, spool_directory, spools_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """Outcome of one `replay`; points that had arrived before are not counted again."""

    num_runs: int  # runs that are whole on the server now
    num_points: int
    num_broken_lines: int
    refused: dict[Path, str] = field(default_factory=dict)  # spools that the server refused, with its reason


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cursor:
    """Position up to which a spool has arrived at one run of one server; for any other the spool starts over."""

    uri: str
    run_id: str
    offset: int
    missing: dict[str, str] = field(default_factory=dict)  # folders of the artifacts before `offset` that were gone


class SpoolReplay:
    """Replay of one spool to a server, slice by slice; its position is kept on disk.

    An attempt that resumes from a checkpoint repeats some points. A server never forgets a point, and would show both.
    The first stays, because it is there while the second is still unknown. The spool has both.
    """

    def __init__(self, path: Path, store: MlflowStore) -> None:
        self._path = path
        self._store = store
        self._offset = 0
        self._attempt = 0  # number of times that the run was opened before `_offset`
        self._made_by: dict[tuple[str, int], int] = {}  # attempt that made a point first, by metric and step
        self._missing: dict[str, str] = {}  # as in the cursor
        self._run_id = ""  # empty until the server has answered
        self.num_points = 0
        self.num_broken_lines = 0

    def advance(self) -> bool:
        """Send the next slice of the spool; return False when nothing was left.

        Raises:
            TrackingError: nothing is lost; the next call sends the same slice again, and the server keeps one copy.
                Or everything has arrived except an artifact whose copy in the spool is gone.
        """
        if not self._run_id and not self._attach():
            return False
        part = read_spool(self._path, offset=self._offset)
        if part.end_offset == self._offset:
            self._send_missing()
            return False
        attempt, num_points = self._attempt, 0  # a slice that fails is sent again as a whole
        for is_metrics, events in groupby(part.events, key=lambda event: event.kind == "metrics"):
            if is_metrics:
                points, _ = self._new_points(events, attempt)
                self._store.send_metrics(self._run_id, points)
                num_points += len(points)
            else:
                for event in events:
                    attempt += event.kind == "open"
                    self._send(event)
        self._offset, self._attempt = part.end_offset, attempt
        self.num_points += num_points
        if part.num_broken_lines:
            self.num_broken_lines += part.num_broken_lines
            log.warning("%s: left out %d line(s) that a crash cut off", self._path, part.num_broken_lines)
        self._note()
        return True

    def finish(self) -> None:
        """Send the rest of a spool that nobody writes to; a last line without its end counts as broken.

        Raises:
            TrackingError: as in `advance`, or no line names the run.
        """
        with self._path.open("rb", buffering=0) as file:
            if is_torn(file):
                self.num_broken_lines += 1
                log.warning("%s: left out the last line, which a crash cut off", self._path)
        while self.advance():
            pass
        if not self._run_id and read_spool(self._path).end_offset:
            raise TrackingError("no line of it says which run it is of")

    def _attach(self) -> bool:
        opened = next((event for event in read_spool(self._path).events if event.header is not None), None)
        if opened is None or opened.header is None:
            return False
        self._run_id = self._store.attach(opened.header, start_ms=opened.time_ms)
        cursor = _read_cursor(self._path)
        if (cursor.uri, cursor.run_id) == (self._store.uri, self._run_id):
            self._skip(cursor.offset)
            self._missing = cursor.missing
        return True

    def _note(self) -> None:
        """Write the position to disk."""
        cursor = _Cursor(uri=self._store.uri, run_id=self._run_id, offset=self._offset, missing=self._missing)
        write_record(cursor, self._path.with_suffix(".cursor"))

    def _skip(self, offset: int) -> None:
        """Move to `offset`, and note the points before it as made."""
        while self._offset < offset:
            # `readlines` stops with the line that takes it beyond its limit: one byte less, and that is the last one.
            part = read_spool(self._path, offset=self._offset, max_bytes=max(1, offset - self._offset - 1))
            if part.end_offset == self._offset:
                break
            _, self._attempt = self._new_points(part.events, self._attempt)
            self._offset = part.end_offset

    def _new_points(self, events: Iterable[Event], attempt: int) -> tuple[list[Point], int]:
        """Points that no earlier attempt made, with results of a whole run; and the number of the last attempt."""
        points = []
        for event in events:
            attempt += event.kind == "open"
            for name, value in event.metrics.items():
                if event.is_result or self._made_by.setdefault((name, event.step), attempt) == attempt:
                    points.append((name, value, event.time_ms, event.step))
        return points, attempt

    def _send(self, event: Event) -> None:
        """Send all of an event but its metrics."""
        match event.kind:
            case "open":
                assert event.header is not None
                self._store.start(self._run_id, event.header)
            case "params":
                self._store.send_params(self._run_id, event.fields)
            case "tags":
                self._store.send_tags(self._run_id, event.fields)
            case "artifact":
                if not self._send_artifact(event.path, event.folder):
                    self._missing[event.path] = event.folder
            case "end":
                self._store.end(self._run_id, status=event.status, time_ms=event.time_ms)

    def _send_artifact(self, path: str, folder: str) -> bool:
        """Send one artifact; return False if its copy is gone, which leaves the rest of the spool unaffected."""
        copy = self._path.parent / path
        if copy.is_file():
            self._store.send_artifact(self._run_id, copy, folder=folder)
        return copy.is_file()

    def _send_missing(self) -> None:
        """Send artifacts whose copy was gone and is back."""
        gone = {path: folder for path, folder in self._missing.items() if not self._send_artifact(path, folder)}
        if gone != self._missing:
            self._missing = gone
            self._note()
        if gone:
            names = ", ".join(str(self._path.parent / path) for path in gone)
            raise TrackingError(f"all has arrived but files that are gone: {names}; put them back")


def replay(root: Path, uri: str) -> ReplayResult:
    """Send every spool under `root` to `uri`. A second replay, or one to a server with a part, duplicates nothing.

    A spool that the server refuses stays as it is and does not stop the others.

    Raises:
        ConfigError: there is no spool.
        TrackingError: the server does not answer; the spools stay as they are.
    """
    directory = spool_directory(root)
    paths = sorted(directory.glob("*.jsonl"))
    require(root.is_dir(), "run root", "must be a directory", str(root))
    require(bool(paths), "run root", "must hold spools of runs", str(root), f"{directory} has none")
    store = MlflowStore(uri)
    store.check()
    replays = {path: SpoolReplay(path, store) for path in paths}
    refused: dict[Path, str] = {}
    for path, spool in replays.items():
        try:
            spool.finish()
        except (OSError, TrackingError) as error:
            store.check()  # raises if the server has died: else each spool would wait for it
            refused[path] = str(error)
    return ReplayResult(
        num_runs=len(replays) - len(refused),
        num_points=sum(spool.num_points for spool in replays.values()),
        num_broken_lines=sum(spool.num_broken_lines for spool in replays.values()),
        refused=refused,
    )


def not_arrived(spool: Path, uri: str | None) -> str:
    """Count what the server `uri` lacks of a spool, as in `12 points and 3 other entries`; empty if it lacks nothing.

    A spool knows what has arrived at the last server alone, for which None stands: any other lacks all of it.
    """
    cursor = _read_cursor(spool)
    is_of_server = uri in (None, cursor.uri)
    events = list(read_events(spool, offset=cursor.offset if is_of_server else 0))
    num_points = sum(len(event.metrics) for event in events)
    num_others = sum(event.kind != "metrics" for event in events) + is_of_server * len(cursor.missing)
    return f"{num_points} points and {num_others} other entries" if num_points or num_others else ""


def unsent(root: Path, execution: str, uri: str | None) -> list[str]:
    """Runs of `execution` that the server `uri`, None for the last one, does not have in full, with what it lacks."""
    return [f"{key} ({what})" for key, path in spools_of(root, execution) if (what := not_arrived(path, uri))]


def replay_command(root: Path, uri: str | None, *, program: Sequence[str] = ("slipstream",)) -> str:
    """Command line that brings the spools under `root` to `uri` or to the SQLite store there."""
    return shlex.join([*program, "replay", str(root.resolve()), *([] if uri is None else ["--uri", uri])])


def _read_cursor(spool: Path) -> _Cursor:
    """Position of a spool; its start if none can be read: the server keeps one copy of what is sent again."""
    try:
        return read_record(_Cursor, spool.with_suffix(".cursor"))
    except (OSError, ConfigError):
        return _Cursor(uri="", run_id="", offset=0)
