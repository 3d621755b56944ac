"""The spool: one append-only JSONL file a run, from which everything can be sent again.

Each line is one event with its original time. A crash can cut only the last line; it is counted, never guessed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from slipstream.config import ConfigError, from_mapping
from slipstream.records.files import append_line

EventKind = Literal["open", "metrics", "params", "tags", "artifact", "end"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """What a run is: enough to create it or to find it again, without any server."""

    experiment: str
    key: str
    name: str
    parent_key: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of the spool. Which of the fields are set follows from `kind`."""

    kind: EventKind
    time_ms: int
    header: RunHeader | None = None  # open
    step: int = 0  # metrics
    is_result: bool = False  # metrics: of the whole run, so that a later attempt's take their place
    metrics: dict[str, float] = field(default_factory=dict)  # metrics
    fields: dict[str, str] = field(default_factory=dict)  # params, tags
    path: str = ""  # artifact, relative to the spool's directory
    folder: str = ""  # artifact: where it lies among the run's
    status: str = ""  # end


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolSlice:
    """The whole lines of a spool from some offset on."""

    events: tuple[Event, ...]
    end_offset: int
    num_broken_lines: int


class Spool:
    """Appends events. `append` hands the line to the operating system; `sync` makes all of them survive a power cut."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        self._file = path.open("a+b", buffering=0)

    def append(self, event: Event) -> None:
        """Write one line whole, mostly in one system call.

        Raises:
            OSError: the disk is full or gone: losing points silently is the one thing the spool must not do.
        """
        line = json.dumps(_without_defaults(event), allow_nan=False, separators=(",", ":")).encode()
        with self._lock:
            append_line(self._file, line)

    def sync(self) -> None:
        """Flush to disk; called a batch at a time, off the step loop."""
        with self._lock:
            if not self._file.closed:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and release the file."""
        self.sync()
        with self._lock:
            self._file.close()


def spool_path(directory: Path, *, experiment: str, key: str) -> Path:
    """The spool file of a run: readable, and unique where the readable part is not."""
    readable = "".join(c if c.isalnum() else "-" for c in key)[-60:].strip("-")
    digest = sha256("\0".join((experiment, key)).encode()).hexdigest()[:8]
    return directory / f"{readable}-{digest}.jsonl"


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


def _parse(line: bytes) -> Event | None:
    try:
        return from_mapping(Event, json.loads(line), "spool")
    except (ConfigError, UnicodeDecodeError, json.JSONDecodeError):
        return None


def _without_defaults(event: Event) -> Mapping[str, Any]:
    values = {
        name: value for name, value in asdict(event).items() if value not in (None, "", {}) and value is not False
    }
    if event.kind != "metrics":
        del values["step"]
    return values
