"""Spool: one append-only JSONL file a run, from which everything can be sent again.

Each line is one event with its original time. A crash can cut only the last line; it is counted, never guessed. This
module also ends runs that a killed process left open, and reads what tasks cost; no server is asked.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Literal

from slipstream.config import ConfigError, from_mapping, to_mapping
from slipstream.records.files import append_line

GPUS_TAG = "num_gpus"
"""Tag of a task's run: the GPUs that are reserved while it runs."""

_MS_PER_HOUR = 3_600_000


class RunStatus(StrEnum):
    """Status of a run that has ended, in MLflow's words."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"

    @classmethod
    def of_error(cls, kind: type[BaseException]) -> RunStatus:
        """Status of a run that an error ends: an error that is no `Exception` is an interrupt."""
        return cls.FAILED if issubclass(kind, Exception) else cls.KILLED


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """Identity of a run: enough to create it, or to find it again, without a server."""

    experiment: str
    key: str
    name: str
    parent_key: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of the spool; `kind` decides which of the other fields are set."""

    kind: Literal["open", "metrics", "params", "tags", "artifact", "end"]
    time_ms: int
    header: RunHeader | None = None  # open
    step: int = 0  # metrics
    is_result: bool = False  # metrics: of the whole run, so that those of a later attempt replace them
    metrics: dict[str, float] = field(default_factory=dict)  # metrics
    fields: dict[str, str] = field(default_factory=dict)  # params, tags
    path: str = ""  # artifact, relative to the spool's directory
    folder: str = ""  # artifact: its folder among the run's artifacts
    status: str = ""  # end


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolSlice:
    """Whole lines of a spool from some offset on."""

    events: tuple[Event, ...]
    end_offset: int
    num_broken_lines: int


class Spool:
    """Writer of events. `append` hands the line to the operating system; `sync` makes all lines survive a power cut."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        self._file = path.open("a+b", buffering=0)

    def append(self, event: Event) -> None:
        """Write one line whole, mostly in one system call.

        Raises:
            OSError: the disk is full or gone: the spool must never lose points silently.
        """
        line = json.dumps(to_mapping(event, exclude_defaults=True), allow_nan=False, separators=(",", ":")).encode()
        with self._lock:
            append_line(self._file, line)

    def sync(self) -> None:
        """Flush to disk; this is called once a batch, off the step loop."""
        with self._lock:
            if not self._file.closed:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and release the file."""
        self.sync()
        with self._lock:
            self._file.close()


def now_ms() -> int:
    """Present time as MLflow counts it."""
    return time.time_ns() // 1_000_000


def spool_directory(root: Path) -> Path:
    """Directory of the spools of all runs under `root`."""
    return root / "spool"


def spool_path(root: Path, *, experiment: str, key: str) -> Path:
    """Spool file of a run: its name is readable, and unique where the readable part is not."""
    readable = "".join(c if c.isalnum() else "-" for c in key)[-60:].strip("-")
    digest = sha256("\0".join((experiment, key)).encode()).hexdigest()[:8]
    return spool_directory(root) / f"{readable}-{digest}.jsonl"


def read_spool(path: Path, *, offset: int = 0, max_bytes: int = 1 << 22) -> SpoolSlice:
    """Read the whole lines from `offset` on, about `max_bytes` of them; a last line without its end is left."""
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.readlines(max_bytes)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    events = [_parse(line) for line in lines]
    return SpoolSlice(
        events=tuple(event for event in events if event is not None),
        end_offset=offset + sum(map(len, lines)),
        num_broken_lines=sum(event is None for event in events),
    )


def read_events(path: Path, *, offset: int = 0) -> Iterator[Event]:
    """Yield every event of a spool from `offset` on, slice by slice."""
    while (part := read_spool(path, offset=offset)).end_offset > offset:
        offset = part.end_offset
        yield from part.events


def end_open_runs(root: Path, execution: str, status: RunStatus) -> list[str]:
    """End every run of `execution` whose spool does not end it; return their keys. No process may write to them."""
    ended = []
    for key, path in spools_of(root, execution):
        if _is_open(path):
            spool = Spool(path)
            spool.append(Event(kind="end", time_ms=now_ms(), status=status.value))
            spool.close()
            ended.append(key)
    return ended


def has_ended(root: Path, experiment: str, key: str) -> bool:
    """Return True if the run `key` was opened before and no process has it open now."""
    path = spool_path(root, experiment=experiment, key=key)
    return path.is_file() and not _is_open(path)


def open_executions(root: Path) -> list[str]:
    """Return the executions whose run is open; the key of a task's run has a `/`."""
    return [key for key, path in _keyed(root) if key and "/" not in key and _is_open(path)]


def spools_of(root: Path, execution: str, *, since_s: float = 0.0) -> Iterator[tuple[str, Path]]:
    """Yield the spools of an execution's run and of its tasks that were written since `since_s`, each with its key."""
    for key, path in _keyed(root, since_s=since_s):
        if key == execution or key.startswith(f"{execution}/"):
            yield key, path


def _keyed(root: Path, *, since_s: float = 0.0) -> Iterator[tuple[str, Path]]:
    """Yield all spools, each with the key of its run."""
    for path in sorted(spool_directory(root).glob("*.jsonl")):
        if path.stat().st_mtime < since_s:
            continue
        yield next((event.header.key for event in read_events(path) if event.header is not None), ""), path


def _is_open(path: Path) -> bool:
    opened = [event.kind == "open" for event in read_events(path) if event.kind in ("open", "end")]
    return bool(opened) and opened[-1]


def spent(root: Path, execution: str, *, now_ms: int) -> tuple[float, float]:
    """Hours in which at least one task of `execution` ran, and GPU hours over all its tasks.

    Each attempt counts from its start to its last event.

    Args:
        now_ms: end of an attempt that still goes on, if it has logged nothing later.
    """
    tasks = [path for key, path in spools_of(root, execution) if key != execution]
    attempts = sorted(attempt for path in tasks for attempt in _attempts(path, now_ms=now_ms))
    union_ms, covered_to = 0, 0  # tasks that run side by side count once
    for start_ms, end_ms, _ in attempts:
        union_ms += max(0, end_ms - max(start_ms, covered_to))
        covered_to = max(covered_to, end_ms)
    gpu_ms = sum((end_ms - start_ms) * num_gpus for start_ms, end_ms, num_gpus in attempts)
    return union_ms / _MS_PER_HOUR, gpu_ms / _MS_PER_HOUR


def _attempts(path: Path, *, now_ms: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and GPUs of a spool's attempts. A killed attempt counts up to its last event."""
    start_ms, last_ms, num_gpus = None, 0, 0
    for event in read_events(path):
        if event.header is not None:
            if start_ms is not None:
                yield start_ms, last_ms, num_gpus
            start_ms, num_gpus = event.time_ms, int(event.header.tags.get(GPUS_TAG, "0"))
        last_ms = event.time_ms
        if event.kind == "end" and start_ms is not None:
            yield start_ms, last_ms, num_gpus
            start_ms = None
    if start_ms is not None:
        yield start_ms, max(last_ms, now_ms), num_gpus


def _parse(line: bytes) -> Event | None:
    try:
        return from_mapping(Event, json.loads(line), "spool")
    except (ConfigError, UnicodeDecodeError, json.JSONDecodeError):
        return None
