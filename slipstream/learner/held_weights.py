"""What a learner rank holds of the checkpoint's tensors: gathered whole, or as it lies, to be answered for."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

from torch import Tensor
from torch.nn import Module

from slipstream.learner import collectives, weights
from slipstream.learner.architecture import Architecture
from slipstream.learner.weights import Layout, Shard
from slipstream.refit.fingerprint import HeldWeights, WeightPart


def held_weights(parameters: Mapping[str, Tensor], arch: Architecture, shard: Shard) -> Iterator[HeldWeights]:
    """A rank's Megatron parameters, by their names there, as parts of Hugging Face tensors.

    Over all ranks each element comes once: what is replicated on the first rank that has it, a tied output layer as the
    embedding that it is.
    """
    for mapping in _answered_for(arch, shard):
        tensor = parameters[mapping.megatron]
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts, split = _layout(mapping, arch, shard, tensor.shape[0], tensor.shape[-1], dtype)
        yield HeldWeights(tensor=tensor, parts=parts, split=split)


def gathered_weights(
    parameters: Mapping[str, Tensor], arch: Architecture, shard: Shard, *, only: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """All Hugging Face tensors, whole, on every rank, or those that `only` names; collective."""
    given: set[str] = set()
    for stage, holder, mapping in _places(arch, shard):
        if given.issuperset(mapping.hf):
            continue  # the last stage's copy of a tied embedding
        given.update(mapping.hf)
        if only is not None and not any(name in only for name in mapping.hf):
            continue
        tensors = None
        if stage == shard.pipeline_rank:
            own = parameters[mapping.megatron].detach()
            if mapping.is_expert:
                own = collectives.from_expert_rank(holder, own)
            shards = collectives.tensor_parallel_shards(own)
            tensors = weights.hf_from_shards(mapping, shards, arch)
        yield from collectives.from_pipeline_stage(stage, tensors)


def gathered_mtp_weights(mtp: Module | None, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of the MTP layer, whole, on every rank; collective. None of a policy without one."""
    parameters = {} if mtp is None else dict(mtp.named_parameters())
    for mapping in weights.mtp_mappings(arch):
        shards = collectives.tensor_parallel_shards(parameters[mapping.megatron].detach())
        yield from weights.hf_from_shards(mapping, shards, arch)


def _places(arch: Architecture, shard: Shard) -> Iterator[tuple[int, int, weights.Mapping]]:
    """Every parameter of the model, with the stage and the rank among those of experts that hold it."""
    for stage in range(shard.pipeline_size):
        for holder in range(shard.expert_size):
            for mapping in weights.mappings(arch, replace(shard, pipeline_rank=stage, expert_rank=holder)):
                if holder == 0 or mapping.is_expert:
                    yield stage, holder, mapping


@cache
def _answered_for(arch: Architecture, shard: Shard) -> tuple[weights.Mapping, ...]:
    def is_copy(mapping: weights.Mapping) -> bool:
        is_tied = mapping.megatron == "output_layer.weight" and arch.tie_word_embeddings
        is_replicated = mapping.layout is Layout.REPLICATED and shard.tensor_rank > 0
        return is_tied or is_replicated or shard.is_copy(mapping)

    return tuple(mapping for mapping in weights.mappings(arch, shard) if not is_copy(mapping))


@cache  # the same at every refit, and of hundreds of tensors
def _layout(
    mapping: weights.Mapping, arch: Architecture, shard: Shard, num_rows: int, num_columns: int, dtype: str
) -> tuple[tuple[WeightPart, ...], Callable[[Tensor], list[Tensor]]]:
    """The parts in a parameter, and what cuts a value a row into theirs."""
    lengths = _lengths(mapping.layout, num_rows, num_columns, arch, shard)
    parts = tuple(
        WeightPart(
            name=name,
            dim=1 if mapping.layout is Layout.ROW else 0,
            start=shard.tensor_rank * length,
            length=length,
            dtype=dtype,
        )
        for name, length in zip(mapping.hf, lengths, strict=True)
    )
    if len(parts) == 1:
        return parts, _whole
    return parts, partial(weights.rows_of_parts, mapping, arch=arch, shard=shard)


def _whole(rows: Tensor) -> list[Tensor]:
    return [rows]


def _lengths(layout: Layout, num_rows: int, num_columns: int, arch: Architecture, shard: Shard) -> list[int]:
    """Of each part, along the dimension in which the tensor is cut."""
    match layout:
        case Layout.QKV:
            heads = [arch.num_attention_heads, arch.num_query_groups, arch.num_query_groups]
            return [num * arch.head_dim // shard.tensor_size for num in heads]
        case Layout.GATE_UP:
            return [num_rows // 2] * 2
        case Layout.ROW:
            return [num_columns]
        case Layout.REPLICATED | Layout.COLUMN:
            return [num_rows]
