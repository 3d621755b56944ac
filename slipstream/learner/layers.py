"""Megatron-Core layer specs of the model, from torch kernels (with or without CUDA) or from TransformerEngine.

Megatron's local spec is not used: its LayerNorm needs Apex, and its attention materializes the scores (2.6 times slower
at 1,024 tokens on a CPU). On a CPU, dense layers without tensor parallelism are those of `cpu/layer.py`.

Legend: `S` tokens of the longest sequence, `B` sequences, `N` query and `K` key-value heads on this rank, `D` head dim,
`P` tokens of all packed sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.learner import parallel
from slipstream.learner.architecture import Architecture, Experts
from slipstream.learner.config import LearnerConfig, Packing, Recompute
from slipstream.learner.cpu import host
from slipstream.learner.cpu.layer import CpuTransformerLayer
from slipstream.learner.mtp_training import MtpLayer
from slipstream.learner.numerics import TORCH_DTYPES
from slipstream.learner.weights import Layout, ParameterMapping, Shard, mappings, mtp_mappings
from slipstream.types import Dtype

_ROTATE = rope_utils._apply_rotary_pos_emb_bshd
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_RECOMPUTED = ["core_attn", "mlp"]
_RECOMPUTE: dict[Recompute, dict[str, Any]] = {  # arguments of `TransformerConfig`
    Recompute.NONE: {},
    Recompute.SELECTIVE: {"recompute_granularity": "selective", "recompute_modules": _RECOMPUTED},
    Recompute.FULL: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class CausalAttention(MegatronModule):
    """Causal grouped-query attention. Padding is on the right, so no real token attends to padding.

    Context-parallel ranks hold parts of the tokens. They exchange them for all tokens of some of the heads each.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale if softmax_scale is not None else cast(int, config.kv_channels) ** -0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend over queries [S, B, N, D], keys and values [S, B, K, D]; returns [S, B, N * D].

        With packed sequences B is 1 and S counts all tokens. S is this rank's part under context parallelism.
        """
        assert attention_mask is None, "the causal mask is the only one"
        query, key, value = (parallel.own_heads(tensor) for tensor in (query, key, value))
        if packed_seq_params is not None:
            query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
            attended = packed_attention(query, key, value, packed_seq_params, scale=self._scale)
            return parallel.own_tokens(attended.flatten(1).unsqueeze(1))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return parallel.own_tokens(_attention(query, key, value, self._scale))


def packed_attention(
    query_PND: Tensor, key_PKD: Tensor, value_PKD: Tensor, packed: PackedSeqParams, *, scale: float
) -> Tensor:
    """Attend from each token to itself and to earlier tokens of its own sequence; returns [P, N, D].

    A GPU computes 16-bit types with torch's FlashAttention kernel for sequences of different lengths. The loop over
    sequences elsewhere is slow; it serves as the reference.
    """
    grouped = query_PND.shape[1] != key_PKD.shape[1]
    if query_PND.is_cuda and query_PND.dtype in _KERNEL_DTYPES:
        starts, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        attended = varlen_attn(
            *(query_PND, key_PKD, value_PKD, starts, starts, longest, longest),
            scale=scale,
            window_size=(-1, 0),  # causal
            enable_gqa=grouped,
        )
        return cast(Tensor, attended)
    parts = []
    for start, end in itertools.pairwise(packed.cu_seqlens_q.tolist()):
        query, key, value = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query_PND, key_PKD, value_PKD))
        parts.append(_attention(query, key, value, scale).view(-1, *query_PND.shape[1:]))
    return torch.cat(parts)


def _attention(query_BNSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, scale: float) -> Tensor:
    """Compute causal attention, [S, B, N * D]."""
    grouped = query_BNSD.size(1) != key_BKSD.size(1)
    out = F.scaled_dot_product_attention(
        query_BNSD, key_BKSD, value_BKSD, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def build_model(arch: Architecture, learner: LearnerConfig, shard: Shard) -> GPTModel:
    """Build this rank's part of the model on the CPU, with undefined weights."""
    config = _transformer_config(arch, learner)
    if _fuses(arch, learner):
        fuse_rotary_embedding()
    model = _HeadlessGpt(
        config=config,
        # Declared too narrowly: a block spec is allowed.
        transformer_layer_spec=cast(ModuleSpec, _block_spec(config, arch, shard, learner)),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_position_embeddings,
        pre_process=shard.is_first,
        post_process=shard.is_last,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,  # type: ignore[arg-type]  # declared int, used as a float
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
    )
    rotary: Any = model.rotary_pos_emb
    rotary.cp_group = None  # Megatron's order of tokens over context-parallel ranks is another: `_preprocess` selects
    if arch.rope_scaling is not None:
        rotary.inv_freq = scaled_rope(arch)[0]
    _mark_tensor_parallel(model, mappings(arch, shard))
    RouterReplay.clear_global_router_replay_instances()  # would keep every model alive; `replayed` asks the model's own
    if host.is_cpu_only():
        host.use_cpu_dispatchers(model)
    return model


def scaled_rope(arch: Architecture) -> tuple[Tensor, float]:
    """Compute transformers' frequencies [D / 2] of a scaled rotary embedding, and its factor of sine and cosine."""
    assert arch.rope_scaling is not None
    config = LlamaConfig(head_dim=arch.head_dim, **arch.positions_to_hf())
    return ROPE_INIT_FUNCTIONS[arch.rope_scaling.type.value](config)


def build_mtp(arch: Architecture, learner: LearnerConfig) -> MtpLayer | None:
    """Build the MTP layer with undefined weights; None for a model without one."""
    if not arch.has_mtp:
        return None
    kernels = _kernels(learner)
    network = MLPSubmodules(linear_fc1=kernels.column, linear_fc2=kernels.row)
    layer = _layer_spec(TransformerLayer, kernels, arch, ModuleSpec(module=MLP, submodules=network))
    mtp = MtpLayer(_transformer_config(arch, learner), norm=kernels.norm, layer=layer)
    _mark_tensor_parallel(mtp, mtp_mappings(arch))
    return mtp


class _HeadlessGpt(GPTModel):
    """GPT model whose output is the hidden states after the final norm.

    `OutputHead` applies the output layer, to as many tokens at a time as fit the memory. Packed sequences are computed
    as one long sequence; only the angles of the rotary embedding and the attention know their borders. Megatron's own
    path for packed sequences (`qkv_format="thd"`) synchronizes with the device twice a layer.
    """

    def _preprocess(  # type: ignore[override]  # called by name
        self, *, position_ids: Tensor, packed_seq_params: PackedSeqParams | None = None, **inputs: Any
    ) -> tuple[Any, ...]:
        whole: tuple[Any, ...] = super()._preprocess(
            position_ids=position_ids, packed_seq_params=cast(PackedSeqParams, packed_seq_params), **inputs
        )
        hidden, angles_S11D, *others = whole
        # The angles are those of positions 0, 1, …: select each token's own.
        if packed_seq_params is not None or self.config.context_parallel_size > 1:
            angles_S11D = angles_S11D[position_ids[0]]
        return hidden, angles_S11D, *others

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:  # type: ignore[override]  # called by name
        return hidden_states


def skips_padding(arch: Architecture, learner: LearnerConfig) -> bool:
    """Return True if the layers are `CpuTransformerLayer`, which computes real tokens only and is dense and unsplit."""
    whole = learner.parallel.tensor == learner.parallel.context == 1 and arch.experts is None and not arch.has_mtp
    return host.is_cpu_only() and whole and not packs(learner)


def packs(learner: LearnerConfig) -> bool:
    """Return True if sequences are packed one behind the other; `auto` packs where an attention kernel supports it."""
    if learner.packing is Packing.AUTO:
        return not host.is_cpu_only() and learner.dtype is Dtype.BFLOAT16
    return learner.packing is Packing.ALWAYS


def _mark_tensor_parallel(model: torch.nn.Module, table: Iterable[ParameterMapping]) -> None:
    """Tag parameters that are split over tensor-parallel ranks, as Megatron does only while it initializes them.

    Gradient clipping takes a split parameter without the tag for a copy. TransformerEngine tags its own.
    """
    parameters = dict(model.named_parameters())
    for mapping in table:
        parameter = parameters[mapping.megatron]
        if mapping.layout is not Layout.REPLICATED and not hasattr(parameter, "tensor_model_parallel"):
            dim = 1 if mapping.layout is Layout.ROW else 0
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


class _RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that Megatron expects."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Under sequence parallelism each rank sees a part of the tokens: by this tag Megatron sums the gradient.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _Kernels(NamedTuple):
    """Module classes of a layer; the parameters have the same names in each choice."""

    norm: Any
    column: Any  # a linear split by outputs
    row: Any  # a linear split by inputs
    attention: Any


def _kernels(learner: LearnerConfig) -> _Kernels:
    """Choose TransformerEngine's kernels on a GPU where it is installed, else torch's.

    Float32 is computed by torch alone, because TransformerEngine multiplies float32 matrices in TF32, too roughly for
    a certificate's judge. Attention over packed sequences and that of context-parallel ranks are always torch's.
    TransformerEngine's fused norm and linear are not used, because their parameters have other names.
    """
    if host.is_cpu_only() or learner.dtype is Dtype.FLOAT32 or find_spec("transformer_engine") is None:
        return _Kernels(_RmsNorm, ColumnParallelLinear, RowParallelLinear, CausalAttention)
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    engine = TESpecProvider()
    norm = engine.layer_norm(rms_norm=True)
    is_ours = packs(learner) or learner.parallel.context > 1
    attention = CausalAttention if is_ours else engine.core_attention()
    return _Kernels(norm, engine.column_parallel_linear(), engine.row_parallel_linear(), attention)


class _Router(TopKRouter):
    """Megatron's router, computed in the weights' type as in transformers and vLLM.

    Megatron's own gating needs TransformerEngine. Its function for an expert bias, which these models lack, would be
    compiled in the first step.
    """

    def gating(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        pass


def _block_spec(
    config: TransformerConfig, arch: Architecture, shard: Shard, learner: LearnerConfig
) -> TransformerBlockSubmodules:
    kernels = _kernels(learner)
    network = MLPSubmodules(linear_fc1=kernels.column, linear_fc2=kernels.row)
    mixture = MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=network), router=_Router)
    module = CpuTransformerLayer if skips_padding(arch, learner) else TransformerLayer
    dense = _layer_spec(module, kernels, arch, ModuleSpec(module=MLP, submodules=network))
    sparse = _layer_spec(module, kernels, arch, ModuleSpec(module=MoELayer, submodules=mixture))
    num_layers = get_num_layers_to_build(config)
    first = shard.pipeline_rank * num_layers
    layers = [sparse if arch.has_experts(first + index) else dense for index in range(num_layers)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=kernels.norm)


def _layer_spec(module: type[TransformerLayer], kernels: _Kernels, arch: Architecture, mlp: ModuleSpec) -> ModuleSpec:
    norms = {"q_layernorm": kernels.norm, "k_layernorm": kernels.norm} if arch.family.qk_norm else {}
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=kernels.column, core_attention=kernels.attention, linear_proj=kernels.row, **norms
        ),
    )
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            input_layernorm=kernels.norm,
            self_attention=attention,
            self_attn_bda=cast(Any, get_bias_dropout_add),
            pre_mlp_layernorm=kernels.norm,
            mlp=mlp,
            mlp_bda=cast(Any, get_bias_dropout_add),
        ),
    )


def _transformer_config(arch: Architecture, learner: LearnerConfig) -> TransformerConfig:
    assert learner.dtype is not Dtype.AUTO, "the stage resolves auto"
    dtype, where = TORCH_DTYPES[learner.dtype], learner.parallel
    config = TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.family.qk_norm,
        add_qkv_bias=arch.family.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=where.tensor,
        pipeline_model_parallel_size=where.pipeline,
        context_parallel_size=where.context,
        sequence_parallel=where.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=learner.dtype is Dtype.BFLOAT16,
        variable_seq_lengths=where.pipeline > 1,  # stages exchange shapes: micro-batches have different lengths
        moe_token_dispatcher_type="alltoall",  # without experts, Megatron still checks this beside variable lengths
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=_fuses(arch, learner),  # torch.compile of the gated unit
        # The loss is already divided by the token count of the whole step: Megatron must only sum over micro-batches
        # and data-parallel ranks, so `num_tokens`, its divisor, is dropped.
        calculate_per_token_loss=True,
        finalize_model_grads_func=lambda model, num_tokens, **kwargs: finalize_model_grads(model, None, **kwargs),
        **(_RECOMPUTE[learner.recompute] | ({} if arch.experts is None else _mixture(arch.experts, learner))),
    )
    if arch.rope_scaling is not None:
        # Megatron multiplies sine and cosine by 0.1 * mscale * ln(scaling factor) + 1; no field has the product itself.
        yarn: Any = config
        yarn.yarn_rotary_scaling_factor, yarn.yarn_mscale_all_dim = math.e, 0.0
        yarn.yarn_mscale = 10 * (scaled_rope(arch)[1] - 1)
    return config


def _fuses(arch: Architecture, learner: LearnerConfig) -> bool:
    """Return True if torch compiles gated unit and rotary embedding: dense layers in bfloat16 on a GPU.

    torch's RMSNorm is one kernel there already. Compiled kernels round once where single operations round after each,
    so float32, in which a judge computes, stays as it is.
    """
    return not host.is_cpu_only() and learner.dtype is Dtype.BFLOAT16 and arch.experts is None


def fuse_rotary_embedding() -> None:
    """Let Megatron rotate queries and keys in one compiled kernel; repeated calls change nothing.

    Megatron's own fusion (`apply_rope_fusion`) needs TransformerEngine. The factor of sine and cosine is a constant of
    the kernel: as an input, which floats are by default, it would be a tensor on the CPU with a kernel in C++.
    """
    if rope_utils._apply_rotary_pos_emb_bshd is _ROTATE:
        torch._dynamo.config.specialize_float = True
        rope_utils._apply_rotary_pos_emb_bshd = torch.compile(_ROTATE, dynamic=True)


def _mixture(experts: Experts, learner: LearnerConfig) -> dict[str, Any]:
    """Return the `TransformerConfig` arguments of a router as in transformers and vLLM, without a balancing loss."""
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.num_experts_per_token,
        "moe_router_pre_softmax": not experts.normalizes_chosen,
        "moe_router_load_balancing_type": "none",
        "moe_enable_routing_replay": True,  # changes nothing until routes are given
        "expert_model_parallel_size": learner.parallel.expert,
        **({"recompute_modules": [*_RECOMPUTED, "moe"]} if learner.recompute is Recompute.SELECTIVE else {}),
    }
