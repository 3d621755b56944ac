"""Parameter names and layouts: Hugging Face <-> Megatron-Core, for the shards of every layout.

One table names the HF tensors in each Megatron parameter and its layout. Both directions read the table, so a round
trip copies elements and computes nothing. A new policy has the same random weights under every layout: those that
Megatron samples on one rank, in its order.

Legend: `H` hidden, `N` query heads, `K` key-value heads, `D` head dim, `F` ffn, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch import Tensor

from slipstream.learner.architecture import Architecture


class Layout(Enum):
    """Layout of a Megatron parameter: how HF tensors make it up and how it is split over tensor-parallel ranks."""

    REPLICATED = auto()  # the same on every rank
    COLUMN = auto()  # split by output rows, dimension 0
    ROW = auto()  # split by input columns, dimension 1
    QKV = auto()  # query, key, value interleaved by key-value head, then split by head
    GATE_UP = auto()  # each rank holds its part of gate above its part of up


@dataclass(frozen=True, slots=True)
class ParameterMapping:
    """One Megatron parameter and the HF tensors in it."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    is_expert: bool = False  # an expert is on one expert-parallel rank, every other parameter on all of them


_INPUT = (
    ("input_layernorm.weight", ("input_layernorm.weight",), Layout.REPLICATED),
    (
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        Layout.QKV,
    ),
)
_QK_NORMS = (
    ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Layout.REPLICATED),
    ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Layout.REPLICATED),
)
_QKV_BIASES = (
    (
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        Layout.QKV,
    ),
)
_OUTPUT = (
    ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Layout.ROW),
    ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Layout.REPLICATED),
)
_MLP = (
    ("linear_fc1.weight", ("gate_proj.weight", "up_proj.weight"), Layout.GATE_UP),
    ("linear_fc2.weight", ("down_proj.weight",), Layout.ROW),
)
_MTP = tuple(  # besides the layer itself
    (f"{name}.weight", (f"{name}.weight",), Layout.REPLICATED)
    for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
)
_Table = tuple[tuple[str, tuple[str, ...], Layout], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Position of a rank in the learner's layout, which determines the part of the model that the rank holds."""

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    data_rank: int = 0  # among ranks that hold the same parameters, apart from experts

    def is_copy(self, mapping: ParameterMapping) -> bool:
        """Return True if a rank with a lower data-parallel number holds the same parameter.

        Source: Megatron's `parallel_state` numbers the ranks of experts before their copies (order "tp-cp-ep-dp-pp").
        """
        return self.data_rank >= (self.expert_size if mapping.is_expert else 1)

    def is_model_copy(self, mapping: ParameterMapping) -> bool:
        """Return True if a rank with a lower tensor-parallel number or an earlier stage holds the same parameter."""
        if mapping.layout is Layout.REPLICATED:
            return self.tensor_rank > 0
        return mapping.megatron == "output_layer.weight" and mapping.hf == ("model.embed_tokens.weight",)

    @property
    def is_first(self) -> bool:
        """True for the pipeline stage that holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last(self) -> bool:
        """True for the pipeline stage that holds the final norm and the output layer."""
        return self.pipeline_rank == self.pipeline_size - 1


MappingTable = Callable[[Architecture, Shard], Iterable[ParameterMapping]]
"""Names the parameters of a model that a rank holds."""


def mappings(arch: Architecture, shard: Shard) -> Iterator[ParameterMapping]:
    """Parameters of a rank in model order; Megatron numbers layers within the pipeline stage."""
    if shard.is_first:
        yield ParameterMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Layout.COLUMN)
    per_stage = arch.num_layers // shard.pipeline_size
    for layer in range(per_stage):
        yield from _layer_mappings(arch, shard, layer, shard.pipeline_rank * per_stage + layer)
    if shard.is_last:
        yield ParameterMapping("decoder.final_layernorm.weight", ("model.norm.weight",), Layout.REPLICATED)
        if not arch.tie_word_embeddings:
            yield ParameterMapping("output_layer.weight", ("lm_head.weight",), Layout.COLUMN)
        elif not shard.is_first:
            # With more than one stage, a tied output layer is a copy of the embedding that Megatron keeps equal.
            yield ParameterMapping("output_layer.weight", ("model.embed_tokens.weight",), Layout.COLUMN)


def vocabulary_mappings(arch: Architecture, shard: Shard) -> Iterator[ParameterMapping]:
    """Parameters of a rank with a row for each token: the embeddings, and the output layer unless it is tied."""
    return (each for each in mappings(arch, shard) if each.megatron.startswith(("embedding.", "output_layer.")))


def mtp_mappings(arch: Architecture, _: Shard | None = None) -> Iterator[ParameterMapping]:
    """Parameters of the MTP layer, which every rank holds; an architecture without one has none."""
    for layer in range(arch.num_mtp_layers):
        hf = f"model.mtp_layers.{layer}"
        yield from _named(_MTP, "", hf)
        yield from _named(_attention(arch), "layer.", hf)
        yield from _named(_MLP, "layer.mlp.", f"{hf}.mlp")


def _layer_mappings(arch: Architecture, shard: Shard, layer: int, hf_layer: int) -> Iterator[ParameterMapping]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{hf_layer}"
    yield from _named(_attention(arch), ours, theirs)
    if arch.experts is None or not arch.has_experts(hf_layer):
        yield from _named(_MLP, f"{ours}mlp.", f"{theirs}.mlp")
        return
    yield ParameterMapping(f"{ours}mlp.router.weight", (f"{theirs}.mlp.gate.weight",), Layout.REPLICATED)
    per_rank = arch.experts.num_experts // shard.expert_size
    for local in range(per_rank):
        expert = f"{theirs}.mlp.experts.{shard.expert_rank * per_rank + local}"
        yield from _named(_MLP, f"{ours}mlp.experts.local_experts.{local}.", expert, is_expert=True)


def _attention(arch: Architecture) -> _Table:
    biases, norms = _QKV_BIASES if arch.family.qkv_bias else (), _QK_NORMS if arch.family.qk_norm else ()
    return (*_INPUT, *biases, *norms, *_OUTPUT)


def _named(table: _Table, ours: str, theirs: str, *, is_expert: bool = False) -> Iterator[ParameterMapping]:
    for megatron, hf, layout in table:
        yield ParameterMapping(f"{ours}{megatron}", tuple(f"{theirs}.{name}" for name in hf), layout, is_expert)


def shard_from_hf(
    read: Callable[[str], Tensor], arch: Architecture, shard: Shard, table: Iterable[ParameterMapping] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Cut a rank's Megatron parameters out of full HF tensors; yields them by Megatron name.

    Args:
        read: returns a full HF tensor by name.
        table: the parameters; None takes the model's `mappings`, without those of an MTP layer.
    """
    for mapping in mappings(arch, shard) if table is None else table:
        yield mapping.megatron, _split(mapping.layout, [read(name) for name in mapping.hf], arch, shard)


def hf_from_shards(mapping: ParameterMapping, shards: Sequence[Tensor], arch: Architecture) -> list[tuple[str, Tensor]]:
    """Join one Megatron parameter's shards, in tensor-parallel rank order, into full HF tensors by name."""
    return list(zip(mapping.hf, _join(mapping.layout, shards, arch), strict=True))


def rows_of_parts(mapping: ParameterMapping, rows: Tensor, arch: Architecture, shard: Shard) -> list[Tensor]:
    """Split a rank's shard, or a tensor of one value a row, into the rows of each HF tensor in HF order."""
    local = replace(  # a shard has the layout of a whole model with fewer heads
        arch,
        num_attention_heads=arch.num_attention_heads // shard.tensor_size,
        num_query_groups=arch.num_query_groups // shard.tensor_size,
    )
    return _join(mapping.layout, [rows], local)


def _split(layout: Layout, parts: list[Tensor], arch: Architecture, shard: Shard) -> Tensor:
    def mine(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(shard.tensor_size, dim)[shard.tensor_rank]

    match layout:
        case Layout.REPLICATED:
            return parts[0]
        case Layout.COLUMN:
            return mine(parts[0], 0)
        case Layout.ROW:
            return mine(parts[0], 1)
        case Layout.GATE_UP:
            return torch.cat([mine(part, 0) for part in parts])
        case Layout.QKV:
            by_group = [part.unflatten(0, (arch.num_query_groups, -1)) for part in parts]  # [K, (N/K | 1 | 1) * D, H]
            return mine(torch.cat(by_group, dim=1), 0).flatten(0, 1)


def _join(layout: Layout, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
    match layout:
        case Layout.REPLICATED:
            return [shards[0]]
        case Layout.COLUMN:
            return [_cat(shards, 0)]
        case Layout.ROW:
            return [_cat(shards, 1)]
        case Layout.GATE_UP:
            gates, ups = zip(*(shard.chunk(2, 0) for shard in shards), strict=True)
            return [_cat(gates, 0), _cat(ups, 0)]
        case Layout.QKV:
            heads_per_group = arch.num_attention_heads // arch.num_query_groups
            by_group = _cat(shards, 0).unflatten(0, (arch.num_query_groups, -1))  # [K, (N/K + 2) * D, H]
            sizes = [heads_per_group * arch.head_dim, arch.head_dim, arch.head_dim]
            return [part.flatten(0, 1) for part in by_group.split(sizes, dim=1)]


def _cat(shards: Sequence[Tensor], dim: int) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)


@torch.no_grad()
def load_exactly(model: torch.nn.Module, state: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `state`, tensor by tensor, into the parameters of `model`; names and shapes must be equal."""
    parameters = dict(model.named_parameters())
    for name, tensor in state:
        parameter = parameters.pop(name, None)
        assert parameter is not None and parameter.shape == tensor.shape, (name, tensor.shape)
        parameter.copy_(tensor)
    assert not parameters, parameters.keys()


def initial_weights(arch: Architecture, *, std: float, seed: int) -> dict[str, Tensor]:
    """Sample full float32 tensors by Hugging Face name: normal with `std`, norms 1, biases 0.

    As in Megatron, projections into the residual stream start smaller by sqrt(2 x layers). An MTP layer is sampled
    last, so that the other weights do not depend on it.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for mapping in [*_in_sampling_order(mappings(arch, Shard())), *mtp_mappings(arch)]:
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


def _in_sampling_order(table: Iterable[ParameterMapping]) -> Iterator[ParameterMapping]:
    """Put the queries, keys and values of each layer behind its output projection, as Megatron samples them."""
    waiting: list[ParameterMapping] = []
    for mapping in table:
        if mapping.megatron.endswith("linear_qkv.weight"):
            waiting.append(mapping)
            continue
        yield mapping
        if mapping.megatron.endswith("linear_proj.weight"):
            yield waiting.pop()


def _shape(mapping: ParameterMapping, arch: Architecture) -> tuple[int, ...]:
    """Shape of the parameter on a single rank."""
    heads, groups, dim, hidden = arch.num_attention_heads, arch.num_query_groups, arch.head_dim, arch.hidden_size
    *_, module, kind = mapping.megatron.split(".")
    matrices = {
        "word_embeddings": (arch.vocab_size, hidden),
        "output_layer": (arch.vocab_size, hidden),
        "linear_qkv": ((heads + 2 * groups) * dim, hidden),
        "linear_proj": (hidden, heads * dim),
        "linear_fc1": (2 * arch.ffn_hidden_size, hidden),
        "linear_fc2": (hidden, arch.ffn_hidden_size),
        "input_proj": (hidden, 2 * hidden),
    }
    if module not in matrices:
        assert module.endswith("_layernorm"), f"unknown parameter {mapping.megatron}"
        return (dim if module in ("q_layernorm", "k_layernorm") else hidden,)
    return matrices[module][:1] if kind == "bias" else matrices[module]
