"""Records as JSON files and lines of append-only files, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config import ConfigError, from_mapping

R = TypeVar("R")


def write_record(record: Any, path: Path) -> Path:
    """Write `record` as JSON, atomically: readers see the old file or the new one, never a part."""
    write_atomic(path, json.dumps(asdict(record), indent=1, allow_nan=False).encode())
    return path


def read_record(cls: type[R], path: Path) -> R:
    """Read a record that `write_record` wrote.

    Raises:
        ConfigError: the file holds other fields than `cls`, or no JSON.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} must be a record in JSON, got other text: {error}") from error
    return from_mapping(cls, values, path.name)


def append_line(file: FileIO, line: bytes) -> None:
    """Append `line` with its end, as a line of its own even where a crash cut off the one before.

    Args:
        file: opened with "a+b" and without a buffer.
    Raises:
        OSError: the disk is full or gone; a part that was written of the line is taken back.
    """
    end = file.seek(0, os.SEEK_END)
    rest = memoryview((b"\n" if is_torn(file) else b"") + line + b"\n")
    num_written = 0
    try:
        while num_written < len(rest):  # a disk that fills up takes a part of a line, and refuses the next write
            num_written += file.write(rest[num_written:])
    except BaseException:
        if os.fstat(file.fileno()).st_size == end + num_written:  # else another process has appended since
            os.ftruncate(file.fileno(), end)
        raise


def is_torn(file: FileIO) -> bool:
    """Return True if the last line of `file` lacks its end."""
    end = os.fstat(file.fileno()).st_size
    return end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to disk and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp's files are private; others look at a report too
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a write names no file
            error.filename = str(path)
        raise
