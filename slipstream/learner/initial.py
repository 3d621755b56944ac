"""Random weights of a new policy: the same whatever the layout of the learner that starts from them.

They are those of Megatron on one rank, drawn in its order: on a second pipeline stage it would draw others, and it
would deal the rows of a gated MLP to other ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.learner.architecture import Architecture
from slipstream.learner.weights import Mapping, Shard, hf_from_shards, mappings, mtp_mappings

_DRAWN_FIRST = ("self_attention.linear_proj.weight", "self_attention.linear_qkv.weight")


def initial_weights(arch: Architecture, *, std: float, seed: int) -> dict[str, Tensor]:
    """Full float32 tensors under their Hugging Face names: normal with `std`, norms 1, biases 0.

    As in Megatron, what writes into the residual stream starts smaller by sqrt(2 x layers). An MTP layer is drawn last:
    the rest is the same with and without.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for mapping in [*_in_drawing_order(list(mappings(arch, Shard()))), *mtp_mappings(arch)]:
        shape = _shape(mapping, arch)
        residual = mapping.megatron.endswith(("linear_proj.weight", "linear_fc2.weight"))
        scale = std / (2 * arch.num_layers) ** 0.5 if residual else std
        if mapping.megatron.endswith(".bias"):
            tensor = torch.zeros(shape)
        elif len(shape) == 1:
            tensor = torch.ones(shape)
        else:
            tensor = torch.empty(shape).normal_(0.0, scale, generator=generator)
        weights.update(hf_from_shards(mapping, [tensor], arch))
    return weights


def _in_drawing_order(table: list[Mapping]) -> list[Mapping]:
    """Model order, but in each layer the attention's projection comes before its queries, keys and values."""

    def place(item: tuple[int, Mapping]) -> tuple[int, int]:
        at, mapping = item
        layer, _, name = mapping.megatron.removeprefix("decoder.layers.").partition(".")
        if name not in _DRAWN_FIRST:
            return at, 0
        first = next(i for i, each in enumerate(table) if each.megatron.startswith(f"decoder.layers.{layer}."))
        return first, 1 + _DRAWN_FIRST.index(name)

    return [mapping for _, mapping in sorted(enumerate(table), key=place)]


def _shape(mapping: Mapping, arch: Architecture) -> tuple[int, ...]:
    """Of the whole parameter."""
    heads, groups, dim, hidden = arch.num_attention_heads, arch.num_query_groups, arch.head_dim, arch.hidden_size
    if mapping.megatron.endswith("linear_qkv.bias"):
        return ((heads + 2 * groups) * dim,)
    match mapping.megatron.split(".")[-2]:
        case "word_embeddings" | "output_layer":
            return arch.vocab_size, hidden
        case "linear_qkv":
            return (heads + 2 * groups) * dim, hidden
        case "linear_proj":
            return hidden, heads * dim
        case "linear_fc1":
            return 2 * arch.ffn_hidden_size, hidden
        case "linear_fc2":
            return hidden, arch.ffn_hidden_size
        case "q_layernorm" | "k_layernorm":
            return (dim,)
        case "input_proj":
            return hidden, 2 * hidden
        case name if name.endswith("_layernorm"):
            return (hidden,)
        case name:
            raise AssertionError(f"unknown parameter {name}")
