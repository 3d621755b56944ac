"""Sampling from weights by one uniform number a row, and block verification of drafts.

Legend: `B` requests, `K` draft tokens of the longest, `N` draft tokens of all requests, `V` vocabulary. Row `i` of a
request, from 0, is the distribution of its draft token `i` after the drafts before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 256  # columns


def columns_at(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """[R] column of each row at which the cumulative share of its weights exceeds a number in [0, 1).

    Only the sums of 256 columns are in float32; cumulative sums over them, and over one of them, are in float64. A row
    without weight gives its last column.
    """
    width = weights_RV.shape[1]
    if width <= _BLOCK:
        return _place(weights_RV, uniform_R)[0]
    missing = -width % _BLOCK
    whole_RV = pad(weights_RV, (0, missing)) if missing else weights_RV
    blocks = whole_RV.view(len(whole_RV), whole_RV.shape[1] // _BLOCK, _BLOCK)
    block, within = _place(blocks.sum(dim=-1), uniform_R)
    column, _ = _place(blocks[torch.arange(len(blocks), device=blocks.device), block], within)
    return (block * _BLOCK + column).clamp_max_(width - 1)


def _place(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Find each row's column of that cumulative share, and how far into the column it lies, in [0, 1)."""
    ends = weights.cumsum(dim=-1, dtype=torch.float64)
    total = ends[:, -1]
    at = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total))).view(-1, 1)  # rounding may reach it
    column = torch.searchsorted(ends, at, right=True).clamp_max_(weights.shape[1] - 1)
    width = weights.gather(1, column).double()
    into = ((at - ends.gather(1, column) + width) / width).nan_to_num_().clamp_(0.0, 1.0)
    return column.view(-1), into.view(-1)


def verify_blocks(
    target_NV: Tensor, draft_NV: Tensor, draft_N: Tensor, counts_B: Tensor, uniform_N: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept as many draft tokens of each request as block verification can, and sample the token after them.

    The tokens that come out follow the policy, as with a test of each token. On average at least as many drafts are
    accepted: a token that alone would be rejected may stand where those before it were likelier than the draft thought.

    Args:
        target_NV: probabilities of the policy, request by request.
        draft_NV: probabilities of the draft.
        draft_N: draft tokens.
        counts_B: draft tokens of each request.
        uniform_N: uniform numbers that decide on acceptance.
        uniform_B: uniform numbers that choose the tokens in place of rejected ones.
    Returns:
        [B] accepted draft tokens of each request, and [B] the token after them, -1 where all are accepted: that one is
        sampled from the policy alone.
    Source:
        Sun et al., Block Verification Accelerates Speculative Decoding, arXiv 2403.10444, algorithm 2.
    """
    num = len(counts_B)
    longest, starts_B = int(counts_B.max()), counts_B.cumsum(0) - counts_B
    request_N = torch.repeat_interleave(torch.arange(num, device=counts_B.device), counts_B, output_size=len(draft_N))
    place_N = torch.arange(len(draft_N), device=counts_B.device) - starts_B[request_N]
    chosen_N1 = draft_N.long().view(-1, 1)
    ratio_BK = torch.ones(num, longest, device=target_NV.device)
    ratio_BK[request_N, place_N] = (target_NV.gather(1, chosen_N1) / draft_NV.gather(1, chosen_N1)).view(-1)
    reach_BK = torch.ones(num, longest + 1, device=target_NV.device)  # the paper's p_0 .. p_K
    for place in range(longest):
        reach_BK[:, place + 1] = (reach_BK[:, place] * ratio_BK[:, place]).clamp_max_(1.0)

    left_NV = (reach_BK[request_N, place_N].view(-1, 1) * target_NV).sub_(draft_NV).clamp_min_(0.0)
    mass_N = left_NV.sum(dim=-1)
    # Row i decides on accepting the i drafts before it; 0 / 0 where the policy and the draft agree on it.
    share_N = (mass_N / (mass_N + 1.0 - reach_BK[request_N, place_N])).nan_to_num_(1.0)
    bound_BK = torch.zeros(num, longest + 1, device=target_NV.device, dtype=torch.float64)
    bound_BK[request_N, place_N] = share_N.double()
    ends = torch.arange(num, device=counts_B.device)
    bound_BK[ends, counts_B] = reach_BK[ends, counts_B].double()

    number_BK = torch.full_like(bound_BK, torch.inf)
    number_BK[request_N, place_N + 1] = uniform_N
    lengths_K = torch.arange(longest + 1, device=counts_B.device)
    accepted_B = torch.where(number_BK < bound_BK, lengths_K, 0).amax(dim=1)

    stops = (accepted_B < counts_B).nonzero().view(-1)
    next_B = torch.full_like(accepted_B, -1)
    next_B[stops] = columns_at(left_NV[starts_B[stops] + accepted_B[stops]], uniform_B[stops])
    return accepted_B, next_B
