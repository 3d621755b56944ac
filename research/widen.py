"""The same policy at a higher price: a feed-forward that is some times as wide, by columns of zeros.

What the policy computes stays the same but for rounding, and so does what a draft knows of it; verifying a token costs
what it costs a policy of that width. The tiny policy is so small that an engine's own work for a rollout outweighs
the verification of its tokens. With a policy that has to compute, as a large one does, a long draft is dear where many
rollouts run.
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
    """Write `policy` with its feed-forward widened, in HF format; `policy` itself for a factor of 1."""
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
    """[I, H] of the projections into the feed-forward get rows, [H, I] of the one out of it columns."""
    if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
        return pad(tensor, (0, 0, 0, more))
    if name.endswith("mlp.down_proj.weight"):
        return pad(tensor, (0, more))
    return tensor
