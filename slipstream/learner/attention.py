"""Causal attention of torch kernels, over sequences padded side by side or packed one behind the other.

Legend: `S` tokens, `B` sequences, `N` query and `K` key-value heads on this rank, `D` head dim, `P` tokens of all
packed sequences.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class CausalAttention(MegatronModule):
    """Causal attention with grouped queries. Padding is on the right, so no real token ever attends to it."""

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
        """[S, B, N, D] queries, [S, B, K, D] keys and values to [S, B, N * D]; packed, B is 1 and S all tokens."""
        assert attention_mask is None, "the causal mask is the only one"
        if packed_seq_params is not None:
            query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
            return packed_attention(query, key, value, packed_seq_params, scale=self._scale).flatten(1).unsqueeze(1)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return _attention(query, key, value, self._scale)


def packed_attention(
    query_PND: Tensor, key_PKD: Tensor, value_PKD: Tensor, packed: PackedSeqParams, *, scale: float
) -> Tensor:
    """[P, N, D]: each token attends to itself and to those before it in its own sequence.

    On a GPU in 16 bits by torch's FlashAttention kernel for sequences of different lengths; elsewhere sequence by
    sequence, which is slow and there to be compared with.
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
    """[S, B, N * D]."""
    grouped = query_BNSD.size(1) != key_BKSD.size(1)
    out = F.scaled_dot_product_attention(
        query_BNSD, key_BKSD, value_BKSD, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out.permute(2, 0, 1, 3).flatten(2)
