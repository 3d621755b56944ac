"""Directories that are replaced as a whole."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """A directory beside `path` to write into, which takes its place when the block ends without an error."""
    partial = begin_directory(path)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # what is half-written helps nobody, and may have filled the disk
        raise
    put_in_place(path)


def begin_directory(path: Path) -> Path:
    """An empty directory beside `path`, for `put_in_place`."""
    partial = partial_directory(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def partial_directory(path: Path) -> Path:
    """Where what is to become `path` is written."""
    return _beside(path, "partial")


def put_in_place(path: Path) -> None:
    """Let what `begin_directory` began take the place of `path`."""
    old = _beside(path, "old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial_directory(path).rename(path)
    shutil.rmtree(old, ignore_errors=True)


def existing_directory(path: Path) -> Path:
    """`path`, or what it held before if the process died between the two renames of `put_in_place`.

    Raises:
        FileNotFoundError: there is neither.
    """
    for candidate in (path, _beside(path, "old")):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"no checkpoint at {path}")


def _beside(path: Path, role: str) -> Path:
    return path.with_name(f"{path.name}.{role}")
