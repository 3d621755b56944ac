"""Snapshots of weights in shared memory, by which a learner refits engines on the same host.

A snapshot is one safetensors file with the names of the Hugging Face checkpoint, in `/dev/shm` if the host has it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import xxhash

from slipstream.config import require
from slipstream.storage import SAFETENSORS_DTYPES, safetensors_header

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.refit.stream import WeightSource

_SHARED_MEMORY = Path("/dev/shm")
_NUM_FILES = 2  # engines may read one version while the next is written


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A file with one version of a model's weights."""

    path: str
    version: int
    num_bytes: int
    digest: str  # of the file's bytes, which every engine must report


def transfer_directory() -> Path:
    """Make a directory for snapshots, in memory if the host has such a file system; the caller removes it."""
    where = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix=_transfer_prefix(os.getpid()), dir=where))


def discard_transfers(pid: int) -> None:
    """Remove the transfer directories of a process that was killed."""
    if _SHARED_MEMORY.is_dir():
        for directory in _SHARED_MEMORY.glob(f"{_transfer_prefix(pid)}*"):
            shutil.rmtree(directory, ignore_errors=True)


def require_space(directory: Path, num_bytes: int) -> None:
    """Refuse a file system without room for the snapshots of `num_bytes` of weights.

    A process that writes to a mapped page without room is killed by a signal, without an error.

    Raises:
        ConfigError: the free space is too small.
    """
    free = shutil.disk_usage(directory).free
    needed = _NUM_FILES * num_bytes
    require(
        needed <= free,
        "refit.channel",
        f"shared_memory needs {needed:,} bytes for {_NUM_FILES} snapshots of the weights in {directory.parent}",
        f"{free:,} bytes free",
        "mount a larger /dev/shm (a pod has 64 MiB unless it says otherwise), or set gloo, which needs no files",
    )


def _transfer_prefix(pid: int) -> str:
    return f"slipstream-refit-{pid}-"


class SnapshotWriter:
    """Writes the versions of one model's weights into two files in turn.

    The files are mapped into memory once and overwritten in place, which takes a third of the time of a new file. An
    engine gets the path of a complete version, and the next version goes into the other file. Tensors are written one
    at a time, so no process holds the whole model.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._buffers: dict[int, Tensor] = {}
        self._header = b""

    def write(self, source: WeightSource, *, version: int) -> Snapshot:
        """Write the tensors of `source` as `version`.

        Raises:
            ConfigError: the file system has no room.
            ValueError: a tensor holds NaN or Inf; the file must not be read.
        """
        from slipstream.refit.stream import as_bytes

        metas = [(each.name, SAFETENSORS_DTYPES[each.dtype], each.shape, each.num_bytes) for each in source.metas()]
        header = safetensors_header(metas, metadata={"format": "pt"})
        assert self._header in (b"", header), "every version has the same tensors"
        self._header = header
        path = self._directory / f"{self._name}-{version % _NUM_FILES}.safetensors"
        buffer = self._buffer(path, version % _NUM_FILES, source.num_bytes())
        start = len(header)
        for _, tensor in source:
            raw = as_bytes(tensor)
            buffer[start : start + len(raw)].copy_(raw)
            start += len(raw)
        source.require_finite()
        return Snapshot(path=str(path), version=version, num_bytes=len(buffer), digest=bytes_digest([buffer]))

    def _buffer(self, path: Path, index: int, num_bytes: int) -> Tensor:
        import torch

        if index not in self._buffers:
            if not self._buffers:
                require_space(self._directory, len(self._header) + num_bytes)
            size = len(self._header) + num_bytes
            with path.open("wb") as file:
                _reserve(file, size)
                file.write(self._header)
            self._buffers[index] = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return self._buffers[index]


def _reserve(file: IO[bytes], size: int) -> None:
    """Allocate the file's space, as a write to a mapped page without room kills the process.

    Raises:
        OSError: the free space is too small.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        directory = Path(file.name).parent
        free = shutil.disk_usage(directory).free
        raise OSError(
            error.errno, f"the weights need {size:,} bytes in {directory}, which has {free:,} free"
        ) from error


def bytes_digest(parts: Iterable[Tensor]) -> str:
    """Compute the digest of byte tensors in sequence."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.numpy().data)
    return digest.hexdigest()
