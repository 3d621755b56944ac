"""Weights as a stream that can be gone through again and again, and that nobody holds whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
        """Of the tensor."""
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> WeightMeta:
        """What `tensor` is."""
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
        """What a pass gives; the first call goes through all tensors once and keeps none: collective."""
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
    """Whether no value is NaN or Inf: both survive a sum, which is cheaper than looking at each value."""
    return math.isfinite(tensor.sum(dtype=torch.float32)) or bool(torch.isfinite(tensor).all())
