"""Send spools to a tracking server: with the original times, each point once, as often as it takes."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from slipstream.records.files import write_atomic
from slipstream.tracking.spool import Event, read_spool
from slipstream.tracking.store import MlflowStore, TrackingError

__all__ = ["ReplayResult", "SpoolReplay", "TrackingError", "replay"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """What one `replay` sent; points that had arrived before are not counted again."""

    num_runs: int
    num_points: int
    num_broken_lines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cursor:
    """How far a spool has arrived. It holds for this run on this server only; anywhere else the spool starts over."""

    uri: str
    run_id: str
    offset: int


class _Points:
    """Tells the points that an attempt makes again, as it goes on from a checkpoint, from those that are new.

    A server never forgets a point, and would draw both. The first stays: it is there while the second is still unknown.
    The spool has both.
    """

    def __init__(self) -> None:
        self.attempt = 0  # how often the run was opened so far
        self._made_by: dict[str, dict[int, int]] = {}  # the attempt that made the point first, by metric and step

    def new(self, event: Event) -> dict[str, float]:
        """Take note of the next event of a spool; the metrics of it that no earlier attempt has made for its step."""
        self.attempt += event.kind == "open"
        if event.is_result:
            return event.metrics
        return {name: value for name, value in event.metrics.items() if self._is_new(name, event.step)}

    def _is_new(self, name: str, step: int) -> bool:
        return self._made_by.setdefault(name, {}).setdefault(step, self.attempt) == self.attempt


class SpoolReplay:
    """Moves one spool to a server, batch by batch, and remembers on disk how far it came."""

    def __init__(self, path: Path, store: MlflowStore) -> None:
        self._path = path
        self._store = store
        self._offset = 0
        self._points = _Points()
        self._attempt = 0  # at `_offset`
        self.run_id: str | None = None
        self.num_points = 0
        self.num_broken_lines = 0

    def advance(self) -> bool:
        """Send the next slice of the spool; False when there was nothing left.

        Raises:
            TrackingError: nothing is lost; the next call sends the same slice again, and the server keeps one copy.
        """
        if self.run_id is None and not self._attach():
            return False
        assert self.run_id is not None
        part = read_spool(self._path, offset=self._offset)
        if part.end_offset == self._offset:
            return False
        self._points.attempt, num_points = self._attempt, 0  # a slice that failed is sent again as a whole
        for is_metrics, events in groupby(part.events, key=lambda event: event.kind == "metrics"):
            if is_metrics:
                points = [
                    (name, value, event.time_ms, event.step)
                    for event in events
                    for name, value in self._points.new(event).items()
                ]
                self._store.send_metrics(self.run_id, points)
                num_points += len(points)
            else:
                for event in events:
                    self._points.new(event)
                    self._send(self.run_id, event)
        self._offset = part.end_offset
        self._attempt = self._points.attempt
        self.num_points += num_points
        if part.num_broken_lines:
            self.num_broken_lines += part.num_broken_lines
            log.warning("%s: left out %d line(s) that a crash cut off", self._path, part.num_broken_lines)
        cursor = _Cursor(uri=self._store.uri, run_id=self.run_id, offset=self._offset)
        write_atomic(_cursor_path(self._path), json.dumps(asdict(cursor)).encode())
        return True

    def finish(self) -> None:
        """Send all that is left of a spool that nobody writes to; a last line without its end counts as broken."""
        while self.advance():
            pass
        self.num_broken_lines += self._path.stat().st_size > self._offset

    def _attach(self) -> bool:
        opened = next((event for event in read_spool(self._path).events if event.header is not None), None)
        if opened is None or opened.header is None:
            return False
        self.run_id = self._store.attach(opened.header, start_ms=opened.time_ms)
        cursor = _read_cursor(self._path)
        if cursor is not None and (cursor.uri, cursor.run_id) == (self._store.uri, self.run_id):
            self._skip(cursor.offset)
        return True

    def _skip(self, offset: int) -> None:
        """Go on from `offset`, with what lies before it noted."""
        while self._offset < offset:
            # `readlines` stops with the line that takes it beyond its limit: one byte less, and that is the last one.
            part = read_spool(self._path, offset=self._offset, max_bytes=max(1, offset - self._offset - 1))
            if part.end_offset == self._offset:
                break
            for event in part.events:
                self._points.new(event)
            self._offset, self._attempt = part.end_offset, self._points.attempt

    def _send(self, run_id: str, event: Event) -> None:
        match event.kind:
            case "open":
                assert event.header is not None
                self._store.start(run_id, event.header)
            case "params":
                self._store.send_params(run_id, event.fields)
            case "tags":
                self._store.send_tags(run_id, event.fields)
            case "artifact":
                self._store.send_artifact(run_id, self._path.parent / event.path, folder=event.folder)
            case "end":
                self._store.end(run_id, status=event.status, time_ms=event.time_ms)


def replay(spool_dir: Path, uri: str, *, request_timeout_s: int = 60) -> ReplayResult:
    """Send every spool under `spool_dir` to `uri`. Doing it twice, or to a server that has a part, duplicates nothing.

    Raises:
        TrackingError: the server does not answer; the spools stay as they are.
    """
    store = MlflowStore(uri, request_timeout_s=request_timeout_s)
    replays = [SpoolReplay(path, store) for path in sorted(spool_dir.glob("*.jsonl"))]
    for spool in replays:
        spool.finish()
    return ReplayResult(
        num_runs=len(replays),
        num_points=sum(spool.num_points for spool in replays),
        num_broken_lines=sum(spool.num_broken_lines for spool in replays),
    )


def sent_bytes(spool: Path) -> int:
    """How much of a spool has arrived at the server that it was last sent to."""
    cursor = _read_cursor(spool)
    return 0 if cursor is None else cursor.offset


def _cursor_path(spool: Path) -> Path:
    return spool.with_suffix(".cursor")


def _read_cursor(spool: Path) -> _Cursor | None:
    path = _cursor_path(spool)
    return _Cursor(**json.loads(path.read_text())) if path.exists() else None
