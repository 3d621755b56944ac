"""A wider policy computes what the narrow one does."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from research.widen import widened

NAMES = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]


def feed_forward(policy: Path, x_TH: torch.Tensor) -> torch.Tensor:
    gate, up, down = (load_file(policy / "model.safetensors")[name] for name in NAMES)
    return (silu(x_TH @ gate.T) * (x_TH @ up.T)) @ down.T


def test_a_wider_feed_forward_gives_the_same_and_has_more_columns(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps({"hidden_size": 4, "intermediate_size": 6}))
    torch.manual_seed(0)
    gate, up, down, norm = torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6), torch.randn(4)
    tensors = {**dict(zip(NAMES, (gate, up, down), strict=True)), "model.norm.weight": norm}
    save_file(tensors, policy / "model.safetensors")

    wide = widened(policy, tmp_path / "wide", 3)
    x_TH = torch.randn(5, 4)
    assert torch.allclose(feed_forward(policy, x_TH), feed_forward(wide, x_TH), atol=1e-6)
    written = load_file(wide / "model.safetensors")
    assert [tuple(written[name].shape) for name in NAMES] == [(18, 4), (18, 4), (4, 18)]
    assert torch.equal(written["model.norm.weight"], norm)
    assert json.loads((wide / "config.json").read_text()) == {"hidden_size": 4, "intermediate_size": 18}
    assert widened(policy, tmp_path / "none", 1) == policy
