"""Fingerprints of weights: 64 bits over name, type, and every element with its place in the checkpoint's tensor.

Fingerprints add up. A tensor's fingerprint is the sum of a number for each element, modulo 2**64. The number depends on
the element's bits and on its row and column in the whole tensor. The fingerprints of shards therefore sum to the
fingerprint of the whole tensor, however it is cut. Every rank fingerprints its own shards on its own device, and only
the sums are sent.

An element with bits `b` in row `r` and column `c` counts `R[r] * (C[c] + mix(b * C[c]))`. `mix(x)` is `x ^ x >> 32`,
and the keys `R` and `C` are odd 64-bit pseudo-random numbers. A 64-bit element counts as two columns. The product
spreads `b` over the upper half, and `mix` spreads the upper half over the lower. As the keys are odd, a change of one
element is always seen. Several changes cancel with a probability near 2**-60, or 2**-32 for changes of signs in one
row. Fingerprints find faults, not forgeries.

-0.0 counts as 0.0, because packed layouts are read by multiplication, which gives 0.0 for both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from slipstream.storage import safetensors_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MODULUS = 1 << 64
GAMMA = 0x9E3779B97F4A7C15 - _MODULUS
"""Step of SplitMix64 (Steele, Lea, Flood 2014) from one number to the next, as a signed number."""
_CPU_CHUNK = 1 << 17  # elements computed at once; at about 20 bytes each they fit into a core's cache
_DEVICE_CHUNK = 1 << 22
_ROW_SEED, _COLUMN_SEED = 0x243F6A8885A308D3, 0x13198A2E03707344  # digits of pi, below 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """A rank's slice of a checkpoint's tensor, along one dimension."""

    name: str  # name of the whole tensor in the checkpoint
    dim: int = 0  # 0, or 1 for a matrix
    start: int = 0
    length: int
    dtype: str  # type of the comparison: torch's name, without `torch.`


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Selection of layers for one refit, where the comparison of all tensors is spread over `count` refits.

    The first number in a tensor's name counts as its layer, so tensors that a model fuses are selected together.
    """

    index: int  # in [0, count)
    count: int

    def takes(self, name: str) -> bool:
        """Return True if the tensor is selected; a tensor without a number belongs to layer 0."""
        layer = next((int(word) for word in name.split(".") if word.isdecimal()), 0)
        return layer % self.count == self.index


ALL = Turn(index=0, count=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeights:
    """A tensor in memory, and the parts of the checkpoint's tensors that make up its rows.

    Several parts have all columns (`dim` 0) and one `dtype`. `split` divides values, one a row of the tensor, into the
    values of each part, in the checkpoint's order of rows.
    """

    tensor: Tensor
    parts: tuple[WeightPart, ...]
    split: Callable[[Tensor], Sequence[Tensor]]


def held_whole(name: str, tensor: Tensor) -> HeldWeights:
    """Describe a whole tensor of a checkpoint."""
    length = len(tensor) if tensor.dim() else 1
    part = WeightPart(name=name, length=length, dtype=str(tensor.dtype).removeprefix("torch."))
    return HeldWeights(tensor=tensor, parts=(part,), split=lambda rows: [rows])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to the calling thread.

    An operation on a chunk takes about 30 µs. A second thread on an idle core saves a quarter of the time. On a busy
    core the two threads wait for each other many times as long at the end of each operation.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def part_fingerprints(held: Iterable[HeldWeights], dtypes: Mapping[str, str] | None = None) -> dict[WeightPart, int]:
    """Compute the fingerprint of each part, in [0, 2**64), on the one device that holds all tensors.

    Layers that share a tensor must hold the same values. On a CPU one core is used, also by the iterator `held`.

    Args:
        dtypes: types, by name, to which tensors are converted first; other tensors keep their type.
    """
    import torch

    parts: list[WeightPart] = []
    sums: list[Tensor] = []
    for weights in held:
        (dtype,) = {(dtypes or {}).get(part.name, part.dtype) for part in weights.parts}
        for part, own_R in zip(weights.parts, weights.split(_row_sums(weights, dtype)), strict=True):
            parts.append(part if part.dtype == dtype else replace(part, dtype=dtype))
            row = part.start if part.dim == 0 else 0
            sums.append((own_R * _keys(_ROW_SEED, row, len(own_R), own_R.device)).sum())
    if not parts:
        return {}
    found: dict[WeightPart, int] = {}
    for part, total in zip(parts, torch.stack(sums).tolist(), strict=True):
        name = xxhash.xxh3_64_intdigest(f"{part.dtype} {part.name}".encode()) | 1
        value = total * name % _MODULUS
        if found.setdefault(part, value) != value:
            raise RuntimeError(f"{part.name} must be one tensor in all layers that share it, got two")
    return found


def weight_totals(ranks: Iterable[Mapping[WeightPart, int]]) -> dict[str, int]:
    """Sum the ranks' parts into a fingerprint for each tensor; ranks that share a part must agree: it counts once."""
    merged: dict[WeightPart, int] = {}
    for fingerprints in ranks:
        torn = [part.name for part, value in fingerprints.items() if merged.get(part, value) != value]
        if torn:
            raise RuntimeError(f"ranks disagree on {torn[0]} and {len(torn) - 1} other tensors that they share")
        merged.update(fingerprints)
    totals: dict[str, int] = {}
    for part, value in merged.items():
        totals[part.name] = (totals.get(part.name, 0) + value) % _MODULUS
    return totals


def file_fingerprints(path: Path, dtypes: Mapping[str, str]) -> dict[str, int]:
    """Fingerprint the tensors that `dtypes` names, converted to these types, in a safetensors file or a directory."""
    return weight_totals([part_fingerprints(_tensors(path, only=dtypes.keys()), dtypes)])


def directory_fingerprint(path: Path) -> str:
    """Fingerprint all tensors in a directory's safetensors files together, as 16 hexadecimal digits."""
    return f"{sum(part_fingerprints(_tensors(path)).values()) % _MODULUS:016x}"


def differences(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """List the names whose fingerprints differ, or that only one side has."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def _tensors(path: Path, only: Collection[str] | None = None) -> Iterator[HeldWeights]:
    """Yield tensors one at a time, so that a model's tensors are never all in memory."""
    from safetensors import safe_open

    for file in safetensors_files(path):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # safe_open is no mapping
                if only is None or name in only:
                    yield held_whole(name, opened.get_tensor(name))


def _row_sums(weights: HeldWeights, dtype_name: str) -> Tensor:
    """Sum a tensor of this type over its columns, in chunks: [rows] int64. A vector is a matrix of one column."""
    import torch

    tensor, first = weights.tensor.detach(), weights.parts[0]
    matrix = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    column = first.start if first.dim == 1 else 0
    dtype: torch.dtype = getattr(torch, dtype_name)
    if dtype.itemsize == 8:  # as two columns, because a product of 64 bits would lose its upper half
        matrix = _without_minus_zero(matrix, dtype).contiguous().view(torch.int32)
        column, dtype = 2 * column, torch.int32
    num_columns = matrix.shape[1]
    keys_C = _keys(_COLUMN_SEED, column, num_columns, matrix.device)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    chunk = _CPU_CHUNK if matrix.device.type == "cpu" else _DEVICE_CHUNK
    sums = []
    for block in matrix.split(max(1, chunk // max(1, num_columns))):
        products = _without_minus_zero(block, dtype).view(integer).long().mul_(keys_C)
        sums.append(products.bitwise_xor_(products >> 32).sum(1))
    return torch.cat(sums) + keys_C.sum()


def _without_minus_zero(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to another type; -0.0 becomes 0.0."""
    converted = tensor.to(dtype)
    if not dtype.is_floating_point or dtype.itemsize == 1:  # torch does not add 8-bit floats
        return converted
    return converted + 0.0


def _keys(seed: int, start: int, length: int, device: torch.device) -> Tensor:
    """Return the keys [length] of the rows or columns from `start` on."""
    end = start + length
    return _key_table(seed, 1 << max(0, end - 1).bit_length(), device)[start:end]


@cache
def _key_table(seed: int, length: int, device: torch.device) -> Tensor:
    """Compute [length] odd int64 by the generator SplitMix64 (Steele, Lea, Flood 2014), with the lowest bit set."""
    import torch

    return mixed(torch.arange(1, length + 1, device=device) * GAMMA + seed) | 1


def mixed(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers as SplitMix64 does; torch's shift to the right repeats the sign."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - _MODULUS), (27, 0x94D049BB133111EB - _MODULUS), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x
