"""Attention over packed sequences, against one mask over all of their tokens."""

from __future__ import annotations

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slipstream.learner.layers import packed_attention

LENGTHS = (3, 1, 5)


@pytest.mark.parametrize("num_groups", [4, 2])
def test_a_packed_token_attends_to_itself_and_to_those_before_it_in_its_own_sequence(num_groups: int) -> None:
    torch.manual_seed(0)
    num_tokens, heads, dim = sum(LENGTHS), 4, 8
    query = torch.randn(num_tokens, heads, dim, dtype=torch.float64)
    key, value = (torch.randn(num_tokens, num_groups, dim, dtype=torch.float64) for _ in "kv")
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    at = torch.arange(num_tokens)
    sees = (sequence[:, None] == sequence) & (at[:, None] >= at)
    wide_key, wide_value = (tensor.repeat_interleave(heads // num_groups, dim=1) for tensor in (key, value))
    scores = torch.einsum("qnd,knd->nqk", query, wide_key) * 0.3
    chances = torch.softmax(scores.masked_fill(~sees, float("-inf")), -1)
    starts = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=5, max_seqlen_kv=5)

    got = packed_attention(query, key, value, packed, scale=0.3)

    torch.testing.assert_close(got, torch.einsum("nqk,knd->qnd", chances, wide_value))
