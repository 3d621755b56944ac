"""Hugging Face <-> Megatron parameter layouts, of dense models and of mixtures of experts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.config import ConfigError
from slipstream.learner.architecture import QWEN3_MOE, Architecture, Experts
from slipstream.learner.weights import Shard, hf_from_shards, mappings, shard_from_hf
from slipstream.types import Dtype

ARCH = Architecture(
    vocab_size=8,
    hidden_size=6,
    num_layers=4,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=2,
    ffn_hidden_size=10,
    max_position_embeddings=32,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_word_embeddings=False,
    eos_token_ids=(1,),
)


def random_hf(arch: Architecture) -> dict[str, Tensor]:
    hidden, ffn, dim = arch.hidden_size, arch.ffn_hidden_size, arch.head_dim
    queries, keys = arch.num_attention_heads * dim, arch.num_query_groups * dim
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes = {f"model.layers.{layer}.{name}": of_layer[name] for layer in range(arch.num_layers) for name in of_layer}
    shapes |= {"model.embed_tokens": (arch.vocab_size, hidden), "model.norm": (hidden,)}
    shapes |= {} if arch.tie_word_embeddings else {"lm_head": (arch.vocab_size, hidden)}
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@settings(deadline=None)
@given(st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.booleans())
def test_shards_join_to_exactly_the_tensors_they_were_cut_from(tensor: int, pipeline: int, tied: bool) -> None:
    arch = dataclasses.replace(ARCH, tie_word_embeddings=tied)
    full = random_hf(arch)
    joined: dict[str, Tensor] = {}
    for stage in range(pipeline):
        sizes = {"tensor_size": tensor, "pipeline_rank": stage, "pipeline_size": pipeline}
        ranks = [Shard(tensor_rank=rank, **sizes) for rank in range(tensor)]
        shards = [dict(shard_from_hf(full.__getitem__, arch, rank)) for rank in ranks]
        for mapping in mappings(arch, ranks[0]):
            joined |= dict(hf_from_shards(mapping, [shard[mapping.megatron] for shard in shards], arch))
    assert joined.keys() == full.keys()
    assert all(torch.equal(joined[name], full[name]) for name in full)


def test_parameters_of_a_mixture_are_counted() -> None:
    assert SPARSE.num_parameters() == sum(tensor.numel() for tensor in random_sparse().values())


EXPERTS = Experts(
    num_experts=4, num_experts_per_token=2, ffn_hidden_size=3, normalizes_chosen=True, dense_layers=(0, 2)
)
SPARSE = dataclasses.replace(ARCH, family=QWEN3_MOE, experts=EXPERTS)  # layers 1 and 3 have experts


def random_sparse() -> dict[str, Tensor]:
    """The dense model's tensors, but of layers 1 and 3 a router and four experts of width 3."""
    generator = torch.Generator().manual_seed(1)
    full = {name: tensor for name, tensor in random_hf(ARCH).items() if "1.mlp." not in name and "3.mlp." not in name}
    for layer in (1, 3):
        mlp = f"model.layers.{layer}.mlp"
        full[f"{mlp}.gate.weight"] = torch.randn((4, 6), generator=generator)
        for expert in range(4):
            for name, shape in (("gate_proj", (3, 6)), ("up_proj", (3, 6)), ("down_proj", (6, 3))):
                full[f"{mlp}.experts.{expert}.{name}.weight"] = torch.randn(shape, generator=generator)
    return full


def test_the_second_of_two_ranks_holds_the_second_half_of_the_experts() -> None:
    shard = Shard(expert_rank=1, expert_size=2, data_rank=1)
    held = {mapping.megatron.removeprefix("decoder.layers."): mapping.hf for mapping in mappings(SPARSE, shard)}
    expected: dict[str, tuple[str, ...]] = {"1.mlp.router.weight": ("model.layers.1.mlp.gate.weight",)}
    for local in (0, 1):
        ours, theirs = f"1.mlp.experts.local_experts.{local}", f"model.layers.1.mlp.experts.{2 + local}"
        expected[f"{ours}.linear_fc1.weight"] = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
        expected[f"{ours}.linear_fc2.weight"] = (f"{theirs}.down_proj.weight",)
    assert {name: hf for name, hf in held.items() if name.startswith("1.mlp")} == expected
    dense = [name for name in held if name.startswith("2.mlp")]
    assert dense == ["2.mlp.linear_fc1.weight", "2.mlp.linear_fc2.weight"]


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
    del config["head_dim"]  # transformers and vLLM then divide the hidden size
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Architecture.from_hf(tmp_path) == dataclasses.replace(SPARSE, head_dim=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [0, 1, 2, 3]}, r"policy.model must have a layer with experts, got \(0, 1, 2, 3\); all"),
        ({"num_experts_per_tok": 1}, "policy.model must choose several experts a token, or not normalize their"),
    ],
)
def test_a_mixture_that_cannot_be_trained_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _read(tmp_path, **change)


def test_queries_keys_and_values_are_interleaved_by_key_value_head() -> None:
    rows = {"q": 8, "k": 4, "v": 4}  # head dim 2: heads q0 q1 | q2 q3 share k0 | k1
    full = random_hf(ARCH)
    for name, count in rows.items():
        start = {"q": 0, "k": 100, "v": 200}[name]
        full[f"model.layers.0.self_attn.{name}_proj.weight"] = torch.arange(start, start + count)[:, None].expand(-1, 6)
    second = Shard(tensor_rank=1, tensor_size=2)
    qkv = dict(shard_from_hf(full.__getitem__, ARCH, second))["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert qkv[:, 0].tolist() == [4, 5, 6, 7, 102, 103, 202, 203]
