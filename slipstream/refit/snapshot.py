"""Moving weights from the learner to the engines: versioned snapshots on storage that both see.

A snapshot is one safetensors file under the names of the Hugging Face checkpoint. On one host the directory lies in
memory (`/dev/shm`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

_SHARED_MEMORY = Path("/dev/shm")  # a file system in memory that learner and engine share
_SAFETENSORS_DTYPES = {
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.int64": "I64",
    "torch.bool": "BOOL",
}
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One version of a model's weights on disk."""

    path: str
    version: int
    num_bytes: int
    digest: str  # of the file's bytes: what every engine must have read


def transfer_directory() -> Path:
    """A fresh directory for snapshots, in memory where the host has such a file system. The caller removes it."""
    where = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix=_transfer_prefix(os.getpid()), dir=where))


def discard_transfers(pid: int) -> None:
    """Remove the transfer directories of a process that was killed and could not do it itself."""
    if _SHARED_MEMORY.is_dir():
        for directory in _SHARED_MEMORY.glob(f"{_transfer_prefix(pid)}*"):
            shutil.rmtree(directory, ignore_errors=True)


def _transfer_prefix(pid: int) -> str:
    return f"slipstream-refit-{pid}-"


class SnapshotWriter:
    """Writes version after version of one model's weights into two files in turn.

    The files are mapped into memory once and overwritten in place, which costs a third of writing a new one. An engine
    gets the path when the version is complete, and the version after it goes into the other file.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._buffers: dict[int, Tensor] = {}
        self._header = b""

    def write(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> Snapshot:
        """Write `weights` as `version`.

        Raises:
            ValueError: a tensor holds NaN or Inf: the engine would sample noise and say nothing.
        """
        import torch

        tensors = dict(weights)
        header = _safetensors_header(tensors)
        assert self._header in (b"", header), "every version has the same tensors"
        self._header = header
        path = self._directory / f"{self._name}-{version % 2}.safetensors"
        buffer = self._buffer(path, version % 2, sum(tensor.nbytes for tensor in tensors.values()))
        start = len(header)
        for name, tensor in tensors.items():
            if not _is_finite(tensor):
                raise ValueError(f"weight {name} of {self._name} version {version} must be finite, got NaN or Inf")
            raw = tensor.detach().contiguous().flatten().view(torch.uint8)
            buffer[start : start + len(raw)].copy_(raw)
            start += len(raw)
        return Snapshot(path=str(path), version=version, num_bytes=len(buffer), digest=bytes_digest([buffer]))

    def _buffer(self, path: Path, index: int, num_bytes: int) -> Tensor:
        import torch

        if index not in self._buffers:
            size = len(self._header) + num_bytes
            with path.open("wb") as file:
                _reserve(file, size)
                file.write(self._header)
            self._buffers[index] = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return self._buffers[index]


def _reserve(file: IO[bytes], size: int) -> None:
    """Have the file system set the space aside: a write to a mapped page that it cannot give kills the process.

    Raises:
        OSError: there is too little.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        directory = Path(file.name).parent
        free = shutil.disk_usage(directory).free
        raise OSError(
            error.errno, f"the weights need {size:,} bytes in {directory}, which has {free:,} free"
        ) from error


def _is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or Inf: both survive a sum, which is cheaper than looking at each value."""
    import torch

    return math.isfinite(tensor.sum(dtype=torch.float32)) or bool(torch.isfinite(tensor).all())


def bytes_digest(parts: Iterable[Tensor]) -> str:
    """Digest of byte tensors, one behind the other."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.numpy().data)
    return digest.hexdigest()


def _safetensors_header(tensors: Mapping[str, Tensor]) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON, padded so that the data is aligned."""
    start = 0
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": _SAFETENSORS_DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
