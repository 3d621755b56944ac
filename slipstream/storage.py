"""Atomic replacement of files and directories, file digests, and directories numbered by training step."""

from __future__ import annotations

import contextlib
import hashlib
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
_ALIGNMENT = 8  # of the first tensor, as safetensors' own writer aligns it

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "bool": "BOOL",
}
"""Names of types in a safetensors file, by torch's name."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Size and digest of a file."""

    num_bytes: int
    xxh3: str


@contextlib.contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to write into, which replaces `path` if the block ends without an error."""
    partial = begin_directory(path)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a half-written directory may have filled the disk
        raise
    put_in_place(path)


def begin_directory(path: Path) -> Path:
    """Create an empty directory beside `path` for `put_in_place`."""
    partial = partial_directory(path)
    remove(partial)
    partial.mkdir(parents=True)
    return partial


def partial_directory(path: Path) -> Path:
    """Return the directory in which the new `path` is written."""
    return _beside(path, _PARTIAL)


def put_in_place(path: Path) -> None:
    """Replace `path` by the directory of `begin_directory`."""
    old = _beside(path, _OLD)
    if path.is_symlink() or path.exists():  # otherwise the process died in an earlier call, and `old` is all there is
        remove(old)
        path.rename(old)
    partial_directory(path).rename(path)
    remove(old)


def existing_directory(path: Path) -> Path:
    """Return `path`, or its previous content if the process died between the two renames of `put_in_place`."""
    for candidate in (path, _beside(path, _OLD)):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"no checkpoint at {path}")


def remove(path: Path) -> None:
    """Remove a directory, a file or a link if it exists and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory of a step."""
    return directory / f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step of a directory of `step_directory`; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and path == step_directory(path.parent, int(match[1])) else None


def step_directories(directory: Path) -> tuple[list[Path], list[Path]]:
    """Return the steps' directories, oldest first, and other paths with a similar name."""
    found: set[Path] = set()
    others: set[Path] = set()
    for path in directory.glob("step-*"):
        own = path.with_name(path.name.removesuffix(f".{_OLD}"))
        if "." in own.name:
            continue  # half-written, or a file beside a step's directory
        if path.is_dir() and step_of(own) is not None:
            found.add(own)
        else:
            others.add(path)
    return sorted(found, key=lambda path: step_of(path) or 0), sorted(others)


def _beside(path: Path, role: str) -> Path:
    return path.with_name(f"{path.name}.{role}")


def sum_of(path: Path) -> Sum:
    """Compute the size and digest of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, xxhash.xxh3_128)
        return Sum(stream.tell(), digest.hexdigest())


def flush_directory(path: Path) -> None:
    """Flush a directory's entries to disk, as `fsync` does for a file's content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def safetensors_files(path: Path) -> list[Path]:
    """List the safetensors files of a model directory in the order of their names; a path to one file is that file.

    An index names the files, as some models of the hub hold their tensors a second time in another file.

    Raises:
        FileNotFoundError: the directory holds no such file.
    """
    files, index = [path], path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    elif path.is_dir():
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} must hold a safetensors file")
    return files


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], *, metadata: dict[str, str] | None = None
) -> bytes:
    """Build the header of a safetensors file from each tensor's name, type, shape and number of bytes, in order.

    With `metadata` the JSON is as compact as from safetensors' own writer.

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
