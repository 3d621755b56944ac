"""Parts of logical tensors that a rank's numbers are, and the index of all ranks' parts.

Logical tensors have Hugging Face names and shapes, whatever the layout. A Megatron parameter is made of bands of rows,
each of which is a box of one logical tensor; a distributed optimizer cuts the parameter, laid out flat, where it likes.
So every run of numbers is a list of pieces, each contiguous in memory and a box of a logical tensor. Saving and loading
under another layout both go by that list. `index.json` has each logical tensor's type and shape, and where its slices
lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.learner.architecture import Architecture
from slipstream.learner.weights import Layout, ParameterMapping, Shard


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: its start and its size in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """The box as an index into a tensor whose first number lies at `origin`."""
        starts = self.offset if origin is None else [o - at for o, at in zip(self.offset, origin, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def within(self, other: Box) -> Box | None:
        """The part that lies in `other` too, None if there is none."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a, b) for a, b in zip(_ends(self), _ends(other), strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def continues(self, other: Box) -> bool:
        """Return True if this box is the next rows after `other`."""
        return (
            self.offset == (other.offset[0] + other.shape[0], *other.offset[1:]) and self.shape[1:] == (other.shape[1:])
        )


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of a rank's parameter, from `first_row` on, that are the box `box` of a logical tensor."""

    name: str
    whole: tuple[int, ...]  # shape of the logical tensor
    box: Box
    first_row: int


@dataclass(frozen=True, slots=True)
class Patch:
    """Numbers of a flat run: those of the spans [start, stop), one after the other, are `box` of a logical tensor."""

    name: str
    whole: tuple[int, ...]
    box: Box
    spans: tuple[tuple[int, int], ...]


def bands(mapping: ParameterMapping, shape: tuple[int, ...], arch: Architecture, shard: Shard) -> list[Band]:
    """The rows of a rank's parameter of this shape, as boxes of logical tensors; no row is left out."""
    rank, size, rows = shard.tensor_rank, shard.tensor_size, shape[0]
    rest, zeros = shape[1:], (0,) * (len(shape) - 1)

    def band(name: str, num_rows: int, first_row: int, whole_row: int, whole_rows: int) -> Band:
        return Band(name, (whole_rows, *rest), Box((whole_row, *zeros), (num_rows, *rest)), first_row)

    match mapping.layout:
        case Layout.REPLICATED:
            return [band(mapping.hf[0], rows, 0, 0, rows)]
        case Layout.COLUMN:
            return [band(mapping.hf[0], rows, 0, rank * rows, size * rows)]
        case Layout.ROW:
            (columns,) = rest
            return [Band(mapping.hf[0], (rows, size * columns), Box((0, rank * columns), shape), 0)]
        case Layout.GATE_UP:
            half = rows // 2
            return [band(name, half, i * half, rank * half, size * half) for i, name in enumerate(mapping.hf)]
        case Layout.QKV:
            num_groups = arch.num_query_groups // size
            heads_per_group = arch.num_attention_heads // arch.num_query_groups
            sizes = (heads_per_group * arch.head_dim, arch.head_dim, arch.head_dim)
            starts = (0, sizes[0], sizes[0] + sizes[1])
            return [
                band(
                    name,
                    num_rows,
                    group * sum(sizes) + start,
                    (rank * num_groups + group) * num_rows,
                    arch.num_query_groups * num_rows,
                )
                for name, num_rows, start in zip(mapping.hf, sizes, starts, strict=True)
                for group in range(num_groups)
            ]


def pieces(parts: list[Band], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Patch]:
    """Cut the numbers [start, stop) of a parameter laid out flat into boxes, of one span each, counted from `start`."""
    width = math.prod(shape[1:])
    for local in _rectangles(shape, start, stop):
        for part in parts:
            mine = Box((part.first_row, *(0 for _ in shape[1:])), part.box.shape).within(local)
            if mine is None:
                continue
            begin = mine.offset[0] * width + sum(mine.offset[1:]) - start
            offset = (part.box.offset[0] + mine.offset[0] - part.first_row, *_added(part.box.offset, mine.offset)[1:])
            yield Patch(part.name, part.whole, Box(offset, mine.shape), ((begin, begin + mine.numel),))


def patches(parts: list[Band], shape: tuple[int, ...], start: int, stop: int) -> list[Patch]:
    """Join `pieces` into as few boxes as they make: what a file holds."""
    found: list[Patch] = []
    for piece in sorted(pieces(parts, shape, start, stop), key=lambda piece: (piece.name, piece.box.offset)):
        last = found[-1] if found else None
        if last is not None and last.name == piece.name and piece.box.continues(last.box):
            rows = last.box.shape[0] + piece.box.shape[0]
            box = Box(last.box.offset, (rows, *last.box.shape[1:]))
            found[-1] = Patch(last.name, last.whole, box, (*last.spans, *piece.spans))
        else:
            found.append(piece)
    return found


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The flat range [start, stop) of a vector or matrix: the rest of a row, whole rows, the beginning of a row."""
    if len(shape) == 1:
        if stop > start:
            yield Box((start,), (stop - start,))
        return
    (_, width) = shape
    while start < stop:
        row, column = divmod(start, width)
        if column == 0 and stop - start >= width:
            num_rows = (stop - start) // width
            yield Box((row, 0), (num_rows, width))
            start += num_rows * width
        else:
            end = min(stop, (row + 1) * width)
            yield Box((row, column), (1, end - start))
            start = end


def _ends(box: Box) -> tuple[int, ...]:
    return _added(box.offset, box.shape)


def _added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of the logical tensor `name`, and in which file it lies."""

    name: str
    dtype: str  # safetensors' name of it
    whole: tuple[int, ...]
    box: Box
    file: str

    @property
    def key(self) -> str:
        """Its name in that file."""
        return slice_key(self.name, self.box)


@dataclass(frozen=True, slots=True)
class Entry:
    """A logical tensor."""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]


Index = dict[str, Entry]


def slice_key(name: str, box: Box) -> str:
    """A slice's name within its file: a rank may hold several slices of one tensor."""
    return f"{name}[{','.join(map(str, box.offset))}]"


def indexed(slices: Iterable[Slice]) -> Index:
    """All ranks' slices by logical tensor.

    Raises:
        ValueError: a tensor is not covered exactly once, or its slices disagree on what it is.
    """
    by_name: dict[str, list[Slice]] = {}
    for each in slices:
        by_name.setdefault(each.name, []).append(each)
    return {name: _entry(name, each) for name, each in sorted(by_name.items())}


def index_to_json(index: Index) -> dict[str, Any]:
    """The content of `index.json`."""
    return {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "slices": [
                {"file": each.file, "offset": each.box.offset, "shape": each.box.shape} for each in entry.slices
            ],
        }
        for name, entry in index.items()
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


def _entry(name: str, slices: list[Slice]) -> Entry:
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
    return Entry(dtype, whole, tuple(slices))
