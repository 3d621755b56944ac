"""Files of a checkpoint: hashed while they are written, flushed to the disk, and checked before they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
_BLOCK_BYTES = 16 << 20
_ALIGNMENT = 8  # of the first tensor, as safetensors' own writer has it

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


@dataclass(frozen=True, slots=True)
class Sum:
    """How many bytes a file has, and their digest."""

    num_bytes: int
    xxh3: str


def rank_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Sum:
    """Write contiguous CPU tensors as one safetensors file.

    The library's own writer gives no digest, so that the file would have to be read again for one.

    Source:
        https://huggingface.co/docs/safetensors, "Format": length of the header, the header in JSON, the tensors.
    """
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with _hashed(path) as write:
        write(len(text).to_bytes(8, "little"))
        write(text)
        for tensor in tensors.values():
            for block in _blocks(tensor):
                write(block)
    return write.sum()


def write_json(path: Path, value: Any) -> Sum:
    """Write JSON without NaN, which not every reader knows."""
    with _hashed(path) as write:
        write(json.dumps(value, allow_nan=False).encode())
    return write.sum()


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


class _Writer:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest, self._num_bytes = stream, xxhash.xxh3_128(), 0

    def __call__(self, data: Any) -> None:
        self._digest.update(data)
        self._num_bytes += self._stream.write(data)

    def sum(self) -> Sum:
        return Sum(self._num_bytes, self._digest.hexdigest())


@contextmanager
def _hashed(path: Path) -> Iterator[_Writer]:
    with path.open("wb") as stream:
        yield _Writer(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _blocks(tensor: Tensor) -> Iterable[memoryview]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    return (data[start : start + _BLOCK_BYTES] for start in range(0, len(data), _BLOCK_BYTES))
