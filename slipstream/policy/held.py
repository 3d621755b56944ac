"""What a learner rank holds of the checkpoint's tensors, and answers for when a refit is checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from slipstream.policy import weights
from slipstream.policy.architecture import Architecture
from slipstream.policy.weights import Layout, Shard
from slipstream.refit.fingerprint import HeldWeights, WeightPart


def held_weights(parameters: Mapping[str, Tensor], arch: Architecture, shard: Shard) -> Iterator[HeldWeights]:
    """A rank's Megatron parameters, by their names there, as parts of Hugging Face tensors.

    Over all tensor-parallel ranks and pipeline stages each element comes once: what is replicated on the first rank, a
    tied output layer as the embedding that it is.
    """
    for mapping in weights.mappings(arch, shard):
        is_copy = mapping.layout is Layout.REPLICATED and shard.tensor_rank > 0
        is_tied = mapping.megatron == "output_layer.weight" and arch.tie_word_embeddings
        if is_copy or is_tied:
            continue
        tensor = parameters[mapping.megatron].detach()
        parts = tuple(
            WeightPart(
                name=name,
                dim=1 if mapping.layout is Layout.ROW else 0,
                start=shard.tensor_rank * length,
                length=length,
                dtype=str(tensor.dtype).removeprefix("torch."),
            )
            for name, length in zip(mapping.hf, _lengths(mapping.layout, tensor, arch, shard), strict=True)
        )
        yield HeldWeights(tensor=tensor, parts=parts, split=partial(_split, mapping, arch, shard))


def _split(mapping: weights.Mapping, arch: Architecture, shard: Shard, rows: Tensor) -> list[Tensor]:
    if mapping.layout is Layout.ROW:
        return [rows]
    return weights.rows_of_parts(mapping, rows, arch, shard)


def _lengths(layout: Layout, tensor: Tensor, arch: Architecture, shard: Shard) -> list[int]:
    """Of each part, along the dimension in which the tensor is cut."""
    match layout:
        case Layout.QKV:
            heads = [arch.num_attention_heads, arch.num_query_groups, arch.num_query_groups]
            return [num * arch.head_dim // shard.tensor_size for num in heads]
        case Layout.GATE_UP:
            return [tensor.shape[0] // 2] * 2
        case Layout.ROW:
            return [tensor.shape[1]]
        case Layout.REPLICATED | Layout.COLUMN:
            return [tensor.shape[0]]
