"""Records as JSON files, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config import ConfigError, from_mapping

R = TypeVar("R")

_READABLE = 0o644


def write_record(record: Any, path: Path) -> Path:
    """Write `record` as JSON, atomically: readers see the old file or the new one, never a part."""
    assert is_dataclass(record)
    write_atomic(path, json.dumps(asdict(record), indent=1, allow_nan=False).encode())  # type: ignore[arg-type]
    return path


def read_record(cls: type[R], path: Path) -> R:
    """Read what `write_record` wrote.

    Raises:
        ConfigError: the file holds other fields than `cls`, or no JSON.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} must be a record in JSON, got other text: {error}") from error
    return from_mapping(cls, values, path.name)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to disk and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(_READABLE)  # mkstemp's files are private; others look at a report too
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
