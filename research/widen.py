"""A policy with a wider feed-forward network, padded with zeros, for a higher cost of verification.

The policy's function is unchanged except for rounding, so a draft still fits the policy, but verifying a token costs as
much as with a policy of that width. In the tiny policy the engine's own work for a rollout exceeds the verification of
the rollout's tokens. In a wide policy, as in a large one, long drafts are expensive while many rollouts run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

_WEIGHTS = "model.safetensors"


def widened(policy: Path, directory: Path, factor: int) -> Path:
    """Write `policy` with a wider feed-forward network in HF format; a factor of 1 returns `policy`."""
    if factor == 1:
        return policy
    if not directory.is_dir():
        shutil.copytree(policy, directory)
        config = json.loads((policy / "config.json").read_text())
        size = config["intermediate_size"]
        (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": factor * size}, indent=2))
        tensors = load_file(policy / _WEIGHTS)
        wide = {name: _wide(name, tensor, (factor - 1) * size) for name, tensor in tensors.items()}
        save_file(wide, directory / _WEIGHTS, metadata={"format": "pt"})
    return directory


def _wide(name: str, tensor: Tensor, more: int) -> Tensor:
    """Pad a tensor: rows of the projections [I, H] into the feed-forward network, columns of that [H, I] out of it."""
    if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
        return pad(tensor, (0, 0, 0, more))
    if name.endswith("mlp.down_proj.weight"):
        return pad(tensor, (0, more))
    return tensor
