"""Files and directories that appear whole: replaced as a whole, hashed, or numbered by training steps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

_STEP = re.compile(r"step-([0-9]{6,})")
_PARTIAL, _OLD = "partial", "old"
_BLOCK_BYTES = 16 << 20
_ALIGNMENT = 8  # of the first tensor, as safetensors' own writer has it

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names of types in a safetensors file, by torch's."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The size of a file in bytes, and its digest."""

    num_bytes: int
    xxh3: str


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
    remove(partial)
    partial.mkdir(parents=True)
    return partial


def partial_directory(path: Path) -> Path:
    """The place where what is to become `path` is written."""
    return _beside(path, _PARTIAL)


def put_in_place(path: Path) -> None:
    """Let what `begin_directory` began take the place of `path`."""
    old = _beside(path, _OLD)
    remove(old)
    if path.is_symlink() or path.exists():
        path.rename(old)
    partial_directory(path).rename(path)
    remove(old)


def existing_directory(path: Path) -> Path:
    """`path`, or what it held before if the process died between the two renames of `put_in_place`.

    Raises:
        FileNotFoundError: there is neither.
    """
    for candidate in (path, _beside(path, _OLD)):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"no checkpoint at {path}")


def remove(path: Path) -> None:
    """Remove a directory, a file or a link, if it is there; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def step_directory(directory: Path, step: int) -> Path:
    """The path of a step's directory."""
    return directory / f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The inverse of `step_directory`; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and path == step_directory(path.parent, int(match[1])) else None


def step_directories(directory: Path) -> tuple[list[Path], list[Path]]:
    """The steps that have a directory, oldest first, and what is only called like one."""
    found: set[Path] = set()
    others: set[Path] = set()
    for path in directory.glob("step-*"):
        own = path.with_name(path.name.removesuffix(f".{_OLD}"))
        if "." in own.name:
            continue  # half-written, or a file beside a directory
        if path.is_dir() and step_of(own) is not None:
            found.add(own)
        else:
            others.add(path)
    return sorted(found, key=lambda path: step_of(path) or 0), sorted(others)


def _beside(path: Path, role: str) -> Path:
    return path.with_name(f"{path.name}.{role}")


def sum_of(path: Path) -> Sum:
    """Read a file for its digest."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
    return Sum(num_bytes, digest.hexdigest())


def flush_directory(path: Path) -> None:
    """Make the names in a directory survive a loss of power, as `fsync` does for what is in a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], *, metadata: dict[str, str] | None = None
) -> bytes:
    """The head of a safetensors file, from each tensor's name, type, shape and number of bytes, in the data's order.

    Args:
        metadata: of the file; with it the JSON is as compact as safetensors' own writer has it.

    Source:
        https://huggingface.co/docs/safetensors, "Format": length of the header, the header in JSON, the tensors.
    """
    start = 0
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    for name, dtype, shape, num_bytes in tensors:
        offsets = [start, start := start + num_bytes]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=None if metadata is None else (",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
