"""A stream of tensors as a stream of bytes in buckets of one size, and back.

The bytes stand one behind the other in the order of the source; a tensor may begin in one bucket and end in a later
one, so no bucket has to hold the largest tensor. vLLM's IPC alone keeps each tensor whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from slipstream.refit.channel.source import WeightMeta


def bucket_sizes(num_bytes: int, bucket_bytes: int) -> list[int]:
    """Bytes of each bucket: full ones, and what is left in the last."""
    full, rest = divmod(num_bytes, bucket_bytes)
    return [bucket_bytes] * full + ([rest] if rest else [])


def whole_tensors_bucket(bucket_bytes: int, models: Iterable[Iterable[WeightMeta]]) -> int:
    """Bytes of a bucket that no tensor may be cut for: as large as the largest tensor of any model that travels."""
    return max([bucket_bytes, *(meta.num_bytes for metas in models for meta in metas)])


def packed(weights: Iterable[tuple[str, Tensor]], buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """Fill the buffers in turn with the tensors' bytes; gives each when it is full, and the last as far as it is.

    Args:
        buffers: uint8 tensors of one size. With n of them, what was given is overwritten once n - 1 more are taken.
    """
    turn, filled = 0, 0
    for _, tensor in weights:
        raw = as_bytes(tensor)
        start = 0
        while start < len(raw):
            buffer = buffers[turn]
            piece = raw[start : start + len(buffer) - filled]
            buffer[filled : filled + len(piece)].copy_(piece)
            start, filled = start + len(piece), filled + len(piece)
            if filled == len(buffer):
                yield buffer
                turn, filled = (turn + 1) % len(buffers), 0
    if filled:
        yield buffers[turn][:filled]


def as_bytes(tensor: Tensor) -> Tensor:
    """[bytes]: a tensor's memory."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class Unpacker:
    """Puts tensors together again; each has memory of its own, for a receiver may keep it for a while."""

    def __init__(self, metas: Iterable[WeightMeta]) -> None:
        self._metas = iter(metas)
        self._meta = next(self._metas, None)
        self._raw = self._fresh()
        self._filled = 0

    def feed(self, bucket: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that are complete with these bytes.

        Raises:
            ValueError: there are more bytes than the metas announced.
        """
        done: list[tuple[str, Tensor]] = []
        start = 0
        while start < len(bucket) or (self._meta is not None and self._filled == len(self._raw)):
            if self._meta is None:
                raise ValueError(f"{len(bucket) - start} bytes came after the last tensor")
            piece = bucket[start : start + len(self._raw) - self._filled]
            self._raw[self._filled : self._filled + len(piece)].copy_(piece)
            start, self._filled = start + len(piece), self._filled + len(piece)
            if self._filled == len(self._raw):
                done.append((self._meta.name, self._raw.view(self._meta.torch_dtype).view(self._meta.shape)))
                self._meta, self._filled = next(self._metas, None), 0
                self._raw = self._fresh()
        return done

    @property
    def is_complete(self) -> bool:
        """Whether every tensor has come."""
        return self._meta is None

    def _fresh(self) -> Tensor:
        return torch.empty(0 if self._meta is None else self._meta.num_bytes, dtype=torch.uint8)
