"""How far the draft is from the policy, computed a few tokens at a time: logits of all tokens are never held.

With p the policy's distribution of a token and q the draft's, both softmax(logits / temperature) over the draft's
vocabulary, and a = sum_v min(p, q) the chance that rejection sampling accepts the draft's token:

    kl_div      sum_v p log(p / q)
    tv          1 - a
    lk          -log(a), with a no smaller than 1e-5
    lk_hybrid   w kl_div + (1 - w) tv, with w = exp(-3 a) taken as a constant

Source: `speculators.losses.eager` of speculators 0.9, of which these are the functions; lk and lk_hybrid are of Samarin
et al., "LK Losses" (arXiv 2602.23881).

Legend: `N` packed tokens, `C` of them in a chunk, `H` hidden size, `D` the draft's vocabulary, `V` the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from speculators.losses import eager
from speculators.models.eagle3.core import Eagle3DraftModel
from torch import Tensor

from slipstream.drafts.eagle3 import draft_ids
from slipstream.drafts.passes import PackedChats

Distance = Callable[[Tensor, Tensor], Tensor]
"""From the draft's logits and the policy's, [1, C, D] each, to a number a token, [1, C]."""

DISTANCES: Mapping[str, Distance] = {
    "kl_div": eager.kl_div_loss,
    "tv": eager.tv_loss,
    "lk": eager.neg_log_acceptance_loss,
    "lk_hybrid": eager.lk_hybrid_loss,
}
_EPS = 1e-5  # of speculators: a pass without a token that counts has no loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """How passes are compared with the policy.

    Attributes:
        decay: pass i counts decay**i.
        chunk_tokens: how many tokens' logits are held at a time.
    """

    distance: Distance
    decay: float
    temperature: float
    chunk_tokens: int


def chunk_losses(
    model: Eagle3DraftModel, head_inputs: Sequence[Tensor], batch: PackedChats, judging: Judging
) -> Iterator[Tensor]:
    """Parts of a row's loss, each with its own graph: go backward before taking the next.

    The loss is the sum over passes of decay**i times the mean distance over the tokens that count.

    Args:
        head_inputs: of each pass, [1, N, H].
    """
    num, num_passes = batch.loss_mask.shape[1], len(head_inputs)
    mask_1N = batch.loss_mask.float()
    counts = [mask_1N[:, number:].sum(dim=1) + _EPS for number in range(num_passes)]
    for start, stop in _chunks(num, judging.chunk_tokens):
        with torch.no_grad():  # later passes look beyond the chunk
            states = batch.last[:, start : stop + num_passes - 1]
            targets = _scaled(model.verifier_lm_head(states), judging.temperature)
        loss = torch.zeros((), device=mask_1N.device)
        for number, hidden_1NH in enumerate(head_inputs):
            size = min(stop, num - number) - start
            if size <= 0:
                break
            logits = _scaled(model.lm_head(hidden_1NH[:, start:stop]), judging.temperature)[:, :size]
            distance = judging.distance(logits, targets[:, number : number + size])
            counted = distance * mask_1N[:, start + number : start + number + size] * judging.decay**number
            loss = loss + (counted.sum(dim=1) / counts[number]).mean()
        yield loss


@torch.no_grad()
def overlaps(
    model: Eagle3DraftModel,
    head_inputs: Sequence[Tensor],
    batch: PackedChats,
    judging: Judging,
    *,
    policy_head_VH: Tensor,
) -> Tensor:
    """[passes, N] chance to accept token i of the window that starts at each position; 0 beyond the row.

    Args:
        policy_head_VH: the policy's whole output layer: what the draft's vocabulary lacks is never drafted, and counts.
    """
    num = batch.loss_mask.shape[1]
    found = torch.zeros(len(head_inputs), num, device=batch.last.device)
    for start, stop in _chunks(num, judging.chunk_tokens):
        states = batch.last[0, start : stop + len(head_inputs) - 1]
        policy = _scaled(torch.nn.functional.linear(states, policy_head_VH), judging.temperature).softmax(-1)
        policy = policy if model.d2t is None else policy[:, draft_ids(model)]
        for number, hidden_1NH in enumerate(head_inputs):
            size = min(stop, num - number) - start
            if size <= 0:
                break
            draft = _scaled(model.lm_head(hidden_1NH[0, start:stop]), judging.temperature).softmax(-1)[:size]
            found[number, start : start + size] = torch.minimum(policy[number : number + size], draft).sum(-1)
    return found


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _chunks(num: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num, size):
        yield start, min(start + size, num)
