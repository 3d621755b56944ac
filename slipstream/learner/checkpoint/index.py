"""What a checkpoint's `index.json` says: each logical tensor's type and shape, and where its slices lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slipstream.learner.checkpoint.boxes import Box


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
    """As `index.json` has it."""
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
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            Box(tuple(each["offset"]), tuple(each["shape"])),
            each["file"],
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
