"""Directories that are replaced as a whole."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_directory(
    path: Path, *, is_main: bool = True, barrier: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """A directory beside `path` to write into, which takes its place when the block ends without an error.

    Args:
        is_main: whether this process creates and renames; one of those that share `path` must.
        barrier: waits for the other processes that write into it.
    """
    partial, old = _beside(path, "partial"), _beside(path, "old")
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # what is half-written helps nobody, and may have filled the disk
        raise
    barrier()
    if is_main:
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    barrier()


def existing_directory(path: Path) -> Path:
    """`path`, or what it held before if the process died between the two renames of `replaced_directory`.

    Raises:
        FileNotFoundError: there is neither.
    """
    for candidate in (path, _beside(path, "old")):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"no checkpoint at {path}")


def _beside(path: Path, role: str) -> Path:
    return path.with_name(f"{path.name}.{role}")
