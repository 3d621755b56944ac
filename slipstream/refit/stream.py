"""The learner's half of a channel that streams: weights that nobody holds whole, their bytes in buckets, and who sends.

Bytes stand one behind the other in the order of the source; a tensor may begin in one bucket and end in a later one, so
no bucket has to hold the largest tensor. vLLM's IPC alone keeps each tensor whole. Every rank of the learner has a
sender, and rank 0's sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.refit.config import Channel, RefitConfig
from slipstream.types import Dtype

Weights = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMeta:
    """One tensor of a checkpoint: all that a receiver has to know before its bytes come."""

    name: str
    dtype: str  # torch's name, without `torch.`
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the tensor."""
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> WeightMeta:
        """Describe `tensor`."""
        return cls(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


class WeightSource:
    """One model's weights, by their names in a checkpoint, always the same ones in the same order.

    Where several ranks hold the model, each of them has a source of its own and goes through it at the same time:
    gathering a tensor is collective.
    """

    def __init__(self, weights: Callable[[], Weights], *, model: str, dtype: Dtype | None = None) -> None:
        """Take tensors as they come.

        Args:
            weights: starts a fresh pass.
            model: its name in errors.
            dtype: of floating-point tensors as they are sent; None: as the model has them.
        """
        self._weights = weights
        self._model = model
        self._dtype = None if dtype is None else getattr(torch, dtype.value)
        self._metas: tuple[WeightMeta, ...] = ()
        self._wrong = ""  # the first tensor of the last pass that was not finite

    def metas(self) -> tuple[WeightMeta, ...]:
        """Tensors of a pass; the first call goes through all of them once and keeps none: collective."""
        if not self._metas:
            self._metas = tuple(WeightMeta.of(name, tensor) for name, tensor in self._converted())
        return self._metas

    def num_bytes(self) -> int:
        """Size of all weights; collective the first time."""
        return sum(meta.num_bytes for meta in self.metas())

    def __iter__(self) -> Weights:
        """All tensors, one at a time; copy one before the next update of the model. Ask `require_finite` afterwards."""
        self._wrong = ""
        for meta, (name, tensor) in zip(self.metas(), self._converted(), strict=True):
            assert meta == WeightMeta.of(name, tensor), f"{meta} first, {name} {tensor.shape} now"
            if not self._wrong and not _is_finite(tensor):
                self._wrong = name
            yield name, tensor.detach()

    def require_finite(self) -> None:
        """Refuse what the last pass gave if a tensor of it held NaN or Inf: an engine would sample noise, silently.

        Not while the weights go by: every rank, and every engine that receives them, is waiting for the rest.

        Raises:
            ValueError: it did.
        """
        if self._wrong:
            raise ValueError(f"weight {self._wrong} of the {self._model} must be finite, got NaN or Inf")

    def _converted(self) -> Weights:
        for name, tensor in self._weights():
            yield name, tensor.to(self._dtype) if self._dtype and tensor.is_floating_point() else tensor


def _is_finite(tensor: Tensor) -> bool:
    """True if no value is NaN or Inf: both survive a sum, which is cheaper than looking at each value."""
    return math.isfinite(tensor.sum(dtype=torch.float32)) or bool(torch.isfinite(tensor).all())


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
        """True if every tensor has come."""
        return self._meta is None

    def _fresh(self) -> Tensor:
        return torch.empty(0 if self._meta is None else self._meta.num_bytes, dtype=torch.uint8)


class EngineControl(Protocol):
    """All engines at once, as a sender steers them: the four calls of vLLM's `VLLMWeightSyncClient`, and two more.

    Each call is made on every engine at the same time and returns when all have answered. It raises `RefitError` that
    names the engines which failed, died, or did not answer in time.
    """

    @property
    def num_workers(self) -> int:
        """Processes that receive: tensor-parallel ranks of all engines."""
        ...

    def aim(self, *, is_draft: bool) -> None:
        """Choose the engines' model that the next updates are for."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the channel; `rank_offset` in `init_info` is that of the first engine."""
        ...

    def start_weight_update(self) -> None:
        """Get ready for an update of one model."""
        ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Take a part of the weights; where they are broadcast, this waits for them."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Bytes that went over a channel."""

    num_bytes: int
    digest: str | None  # of the bytes in their order; None where the channel takes none


class Sender:
    """One rank's part in sending; all ranks make the same calls at the same time.

    This one sends nothing itself: it takes part in the gathering of what rank 0 sends.
    """

    def send(self, source: WeightSource, *, is_draft: bool) -> Sent:
        """Go through all of `source`; of rank 0, bring it into every engine's policy, or its draft.

        Raises:
            RefitError: an engine failed, died, or took longer than the settings allow.
            ValueError: a weight is not finite.
        """
        del is_draft
        for _ in source:
            pass
        return Sent(num_bytes=0, digest=None)

    def close(self) -> None:
        """Leave the channel."""


def open_sender(
    settings: RefitConfig, *, engines: EngineControl, sources: Sequence[WeightSource], rank: int, address: str
) -> Sender:
    """Join the channel with the engines.

    Args:
        settings: the recipe's, with the channel that was chosen.
        sources: of every model whose weights will travel, the policy's first.
        address: of this rank's host, which the engines' hosts can reach.
    """
    if settings.channel is Channel.IPC:
        from slipstream.refit import vllm

        return vllm.open_ipc(settings, engines=engines, sources=sources, rank=rank)
    for source in sources:
        source.metas()  # collective, so on all ranks or on none: one that gathered alone would wait for ever
    if rank > 0:
        return Sender()
    if settings.channel is Channel.NCCL:
        from slipstream.refit import vllm

        return vllm.open_nccl(settings, engines=engines, source=sources[0], address=address)
    from slipstream.refit import gloo

    assert settings.channel is Channel.GLOO, settings.channel
    return gloo.GlooSender(settings, engines=engines, address=address)
