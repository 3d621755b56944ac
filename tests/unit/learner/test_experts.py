"""A mixture of experts: what its config.json says, and which rank holds and answers for which expert."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.config import ConfigError
from slipstream.learner.architecture import Architecture, Experts, require_even_experts
from slipstream.learner.config import ParallelConfig
from slipstream.learner.export import held_weights
from slipstream.learner.weights import Shard, mappings, shard_from_hf
from slipstream.refit.fingerprint import held_whole, part_fingerprints, weight_totals
from slipstream.types import Dtype
from tests.unit.learner.test_weights import ARCH, random_hf

EXPERTS = Experts(
    num_experts=4, num_experts_per_token=2, ffn_hidden_size=3, normalizes_chosen=True, dense_layers=(0, 2)
)
SPARSE = dataclasses.replace(ARCH, experts=EXPERTS)  # layers 1 and 3 have experts


def random_sparse() -> dict[str, Tensor]:
    """The dense model's tensors, but of layers 1 and 3 a router and four experts of width 3."""
    generator = torch.Generator().manual_seed(1)
    full = {name: tensor for name, tensor in random_hf(ARCH).items() if not name.startswith(_SPARSE_MLP)}
    for layer in (1, 3):
        mlp = f"model.layers.{layer}.mlp"
        full[f"{mlp}.gate.weight"] = torch.randn((4, 6), generator=generator)
        for expert in range(4):
            for name, shape in (("gate_proj", (3, 6)), ("up_proj", (3, 6)), ("down_proj", (6, 3))):
                full[f"{mlp}.experts.{expert}.{name}.weight"] = torch.randn(shape, generator=generator)
    return full


_SPARSE_MLP = ("model.layers.1.mlp.", "model.layers.3.mlp.")


def test_the_second_of_two_ranks_holds_the_second_half_of_the_experts() -> None:
    shard = Shard(expert_rank=1, expert_size=2, data_rank=1)
    of_layer = {m.megatron: m.hf for m in mappings(SPARSE, shard) if m.megatron.startswith("decoder.layers.1.mlp")}
    assert of_layer == {
        "decoder.layers.1.mlp.router.weight": ("model.layers.1.mlp.gate.weight",),
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight": (
            "model.layers.1.mlp.experts.2.gate_proj.weight",
            "model.layers.1.mlp.experts.2.up_proj.weight",
        ),
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight": (
            "model.layers.1.mlp.experts.2.down_proj.weight",
        ),
        "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight": (
            "model.layers.1.mlp.experts.3.gate_proj.weight",
            "model.layers.1.mlp.experts.3.up_proj.weight",
        ),
        "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight": (
            "model.layers.1.mlp.experts.3.down_proj.weight",
        ),
    }
    dense = [m.megatron for m in mappings(SPARSE, shard) if m.megatron.startswith("decoder.layers.2.mlp")]
    assert dense == ["decoder.layers.2.mlp.linear_fc1.weight", "decoder.layers.2.mlp.linear_fc2.weight"]


@pytest.mark.parametrize(("expert", "data"), [(1, 1), (1, 2), (2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_every_element_is_answered_for_once(expert: int, data: int, pipeline: int) -> None:
    full = random_sparse()
    shards = [
        Shard(
            pipeline_rank=stage,
            pipeline_size=pipeline,
            expert_rank=rank % expert,
            expert_size=expert,
            data_rank=rank,
        )
        for stage in range(pipeline)
        for rank in range(data)
    ]
    ranks = [
        part_fingerprints(held_weights(dict(shard_from_hf(full.__getitem__, SPARSE, shard)), SPARSE, shard))
        for shard in shards
    ]
    whole = weight_totals([part_fingerprints(held_whole(name, tensor) for name, tensor in full.items())])
    assert weight_totals(ranks) == whole
    assert sum(map(len, ranks)) == len(whole)  # nobody hashes what another rank does


def test_parameters_are_counted() -> None:
    assert SPARSE.num_parameters() == sum(tensor.numel() for tensor in random_sparse().values())


def _read(path: Path, **change: Any) -> Architecture:
    (path / "config.json").write_text(json.dumps(SPARSE.to_hf(Dtype.FLOAT32) | change))
    return Architecture.from_hf(path)


def test_a_config_says_which_layers_have_experts(tmp_path: Path) -> None:
    assert _read(tmp_path) == SPARSE
    every_second = _read(tmp_path, mlp_only_layers=[3], decoder_sparse_step=2).experts
    assert every_second is not None
    assert every_second.dense_layers == (0, 2, 3)  # layers 1 and 3 are the second ones, and 3 is named
    config = SPARSE.to_hf(Dtype.FLOAT32)
    config["num_local_experts"] = config.pop("num_experts")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Architecture.from_hf(tmp_path) == SPARSE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [0, 1, 2, 3]}, r"policy.model must have a layer with experts, got \(0, 1, 2, 3\); all"),
        ({"num_experts_per_tok": 1}, "policy.model must choose several experts a token, or not normalize their"),
        ({"architectures": ["MixtralForCausalLM"]}, "policy.model must be a Qwen3ForCausalLM, a Qwen3Moe"),
    ],
)
def test_a_mixture_that_cannot_be_trained_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _read(tmp_path, **change)


@pytest.mark.parametrize(
    ("experts", "parallel", "message"),
    [
        (None, ParallelConfig(data=2, expert=2), "learner.parallel.expert must be 1 for a policy without experts, got"),
        (EXPERTS, ParallelConfig(data=3, expert=3), "learner.parallel.expert must divide the policy's 4 experts, got"),
        (EXPERTS, ParallelConfig(tensor=2), "learner.parallel.tensor must be 1 for a mixture of experts, got 2; deal"),
    ],
)
def test_a_layout_that_does_not_suit_the_experts_is_refused(
    experts: Experts | None, parallel: ParallelConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_even_experts(experts, parallel)
