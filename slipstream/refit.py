"""Moving weights from the learner to the engines: versioned snapshots on storage that both see.

A snapshot is one safetensors file under the names of the Hugging Face checkpoint, written beside its final place and
renamed, so that an engine can never read half of one. On one host the directory lies in memory (`/dev/shm`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_SHARED_MEMORY = Path("/dev/shm")  # a file system in memory that learner and engine share


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One version of a model's weights on disk."""

    path: str
    version: int
    num_bytes: int


def transfer_directory() -> Path:
    """A fresh directory for snapshots, in memory where the host has such a file system. The caller removes it."""
    where = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix="slipstream-refit-", dir=where))


def write_snapshot(weights: Iterator[tuple[str, Tensor]], directory: Path, *, version: int) -> Snapshot:
    """Write `weights` as the snapshot `version`, replacing any before it.

    Raises:
        ValueError: a tensor holds NaN or Inf: the engine would sample noise and say nothing.
    """
    import torch
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"weight {name} of policy version {version} must be finite, got NaN or Inf")
    path = directory / "policy.safetensors"
    temporary = directory / ".policy.safetensors.part"
    save_file(tensors, temporary)
    temporary.replace(path)
    return Snapshot(path=str(path), version=version, num_bytes=path.stat().st_size)
