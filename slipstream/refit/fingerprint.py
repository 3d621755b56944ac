"""Fingerprints of tensors: equal bits, equal fingerprint. What a refit is checked with and a certificate names.

-0.0 counts as 0.0: layouts that an engine can only be asked for by multiplication give no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor


def fingerprint(tensor: Tensor) -> str:
    """64 bits over type, shape and values."""
    import torch

    values = tensor.detach()
    if values.is_floating_point():
        values = values + 0.0
    values = values.cpu().contiguous()
    digest = xxhash.xxh3_64(f"{values.dtype}{list(values.shape)}".encode())
    digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def combined(fingerprints: Mapping[str, str]) -> str:
    """One fingerprint of named ones, whatever their order."""
    digest = xxhash.xxh3_128()
    for name in sorted(fingerprints):
        digest.update(f"{name}={fingerprints[name]};".encode())
    return digest.hexdigest()


def directory_fingerprint(path: Path) -> str:
    """Of all tensors in a directory's safetensors files.

    Raises:
        FileNotFoundError: there is none.
    """
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} must hold a safetensors file")
    return combined({name: fingerprint(tensor) for file in files for name, tensor in load_file(file).items()})


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Names whose fingerprints differ, or that only one side has."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """The part of a checkpoint's tensor that one engine rank holds: a slice of one dimension, in the engine's dtype."""

    name: str  # under which the checkpoint has the whole tensor
    dim: int
    start: int
    length: int
    dtype: str  # torch's name, without `torch.`

    @property
    def key(self) -> str:
        """Unique among all parts of all ranks."""
        return f"{self.name}[{self.dim}:{self.start}+{self.length}]"


def part_fingerprints(tensors: Iterable[tuple[str, Tensor]], parts: Sequence[WeightPart]) -> dict[str, str]:
    """Fingerprints, by key, that the parts must have if they were cut from `tensors`."""
    import torch

    wanted: dict[str, list[WeightPart]] = {}
    for part in parts:
        wanted.setdefault(part.name, []).append(part)
    found = {}
    for name, tensor in tensors:
        for part in wanted.get(name, ()):
            cut = tensor.detach().narrow(part.dim, part.start, part.length)
            found[part.key] = fingerprint(cut.to(getattr(torch, part.dtype)))
    return found


def file_fingerprints(path: Path, parts: Sequence[WeightPart]) -> dict[str, str]:
    """`part_fingerprints` of the tensors in a safetensors file, or in a directory of them."""
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return part_fingerprints((item for file in files for item in load_file(file).items()), parts)
