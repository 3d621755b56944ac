"""Boxes of logical tensors: the part of each that a rank holds, and the index of the parts of all ranks.

A logical tensor has its Hugging Face name and shape under every layout. A Megatron parameter consists of bands of rows,
each of which is a box of one logical tensor. A distributed optimizer cuts the flat parameter anywhere, so that a save
and a load treat a flat range of a parameter as a list of patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from slipstream.learner.architecture import Architecture
from slipstream.learner.weights import Layout, ParameterMapping, Shard, rows_of_parts


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """The box as an index into a tensor whose first element is at `origin`."""
        starts = (offset - first for offset, first in zip(self.offset, origin, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def within(self, other: Box) -> Box | None:
        """Intersect with another box; None if they do not overlap."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = map(min, _added(self.offset, self.shape), _added(other.offset, other.shape))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of a logical tensor whose elements are, in order, those of a flat range from `start` on."""

    name: str
    whole: tuple[int, ...]  # shape of the logical tensor
    box: Box
    start: int


def bands(mapping: ParameterMapping, shape: tuple[int, ...], arch: Architecture, shard: Shard) -> list[Patch]:
    """Cut a rank's parameter of this shape into runs of whole rows, each of which is a box of a logical tensor."""
    split_dim = {Layout.REPLICATED: None, Layout.ROW: 1}.get(mapping.layout, 0)
    found = []
    for name, rows in zip(mapping.hf, rows_of_parts(mapping, torch.arange(shape[0]), arch, shard), strict=True):
        local = (len(rows), *shape[1:])
        whole = tuple(size * shard.tensor_size if dim == split_dim else size for dim, size in enumerate(local))
        start, *rest = (size * shard.tensor_rank if dim == split_dim else 0 for dim, size in enumerate(local))
        for run in rows.tensor_split((rows.diff() != 1).nonzero().flatten() + 1):  # into runs of adjacent rows
            box = Box((start, *rest), (len(run), *shape[1:]))
            found.append(Patch(name, whole, box, int(run[0]) * math.prod(shape[1:])))
            start += len(run)
    return found


@cache  # training waits for a save
def patches(
    mapping: ParameterMapping, shape: tuple[int, ...], start: int, stop: int, arch: Architecture, shard: Shard
) -> tuple[Patch, ...]:
    """Cut the flat range [start, stop) of a rank's parameter of this shape into boxes of logical tensors."""
    found = []
    for band in bands(mapping, shape, arch, shard):
        first, last = max(start, band.start), min(stop, band.start + band.box.numel)
        for local in _rectangles(band.box.shape, first - band.start, last - band.start):
            box = Box(_added(band.box.offset, local.offset), local.shape)
            found.append(Patch(band.name, band.whole, box, first - start))
            first += local.numel
    return tuple(found)


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut the flat range [start, stop) of a vector or matrix into the end of a row, whole rows, the start of a row."""
    _, *columns = shape
    width = math.prod(columns)  # an element of a vector is a whole row
    while start < stop:
        row, column = divmod(start, width)
        if column == 0 and stop - start >= width:
            found = Box((row, *(0 for _ in columns)), ((stop - start) // width, *columns))
        else:
            found = Box((row, column), (1, min(stop - start, width - column)))
        yield found
        start += found.numel


def _added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, slots=True)
class Slice:
    """A stored box of the logical tensor `name`."""

    name: str
    dtype: str  # as safetensors names it
    whole: tuple[int, ...]  # shape of the logical tensor
    box: Box
    file: str

    @property
    def key(self) -> str:
        """Name within the file, where a rank may store several slices of one tensor."""
        return f"{self.name}[{','.join(map(str, self.box.offset))}]"


Index = dict[str, list[Slice]]
"""The slices of each logical tensor, which cover it exactly once."""


def indexed(slices: Iterable[Slice]) -> Index:
    """Group the slices of all ranks by logical tensor.

    Raises:
        ValueError: a tensor is not covered exactly once, or its slices disagree on its type or shape.
    """
    index: Index = {}
    for each in slices:
        index.setdefault(each.name, []).append(each)
    for name, found in index.items():
        _require_cover(name, found)
    return dict(sorted(index.items()))


def index_to_json(index: Index) -> dict[str, Any]:
    """The content of `index.json`."""
    return {
        name: {
            "dtype": slices[0].dtype,
            "shape": slices[0].whole,
            "slices": [{"file": each.file, "offset": each.box.offset, "shape": each.box.shape} for each in slices],
        }
        for name, slices in index.items()
    }


def index_from_json(content: dict[str, Any]) -> Index:
    """The inverse of `index_to_json`."""
    return indexed(
        Slice(
            name, entry["dtype"], tuple(entry["shape"]), Box(tuple(each["offset"]), tuple(each["shape"])), each["file"]
        )
        for name, entry in content.items()
        for each in entry["slices"]
    )


def _require_cover(name: str, slices: list[Slice]) -> None:
    dtype, whole = slices[0].dtype, slices[0].whole
    for each in slices:
        if (each.dtype, each.whole) != (dtype, whole):
            raise ValueError(f"slices of {name} must agree: {dtype} {whole}, got {each.dtype} {each.whole}")
    entire = Box((0,) * len(whole), whole)
    num_covered = sum(each.box.numel for each in slices)
    inside = all(each.box.within(entire) == each.box for each in slices)
    apart = all(a.box.within(b.box) is None for i, a in enumerate(slices) for b in slices[:i])
    if not (inside and apart and num_covered == entire.numel):
        raise ValueError(f"slices of {name} must cover its shape {whole} once, got {[each.box for each in slices]}")
