"""How much each token counts whose sampler was not quite the policy that is trained.

An engine rounds in its own way, and in an asynchronous loop its weights are older than the learner's. The ratio of a
token is trained policy / policy that sampled, both before the step's first update; its weight multiplies the token's
policy loss, and a token outside the band leaves the loss whole.

Legend: `B` rows of a micro-batch, `T` predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.grpo.config import Correction, Level, LossConfig

Places = Sequence[tuple[int, slice]]
"""Of each sequence of a micro-batch: its row, and its columns there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What the correction makes of a micro-batch's tokens, without gradient."""

    weight_BT: Tensor
    kept_BT: Tensor | None  # bool, False where the band masks a token out; None: all are kept
    changed_BT: Tensor  # bool, True where the cap or the band changed what a token counts


def corrected(log_ratio_BT: Tensor, mask_BT: Tensor, places: Places | None, config: LossConfig) -> Weights | None:
    """Weights and mask of a micro-batch; None where the loss corrects nothing.

    Weight by token: min(ratio, cap). By sequence: the product of a response's ratios, capped, for each of its tokens;
    that is the ratio of the response's two probabilities, and with it the estimate of the gradient is unbiased up to
    the cap. The band holds a token's ratio, or the geometric mean of a response's ratios, which does not grow with its
    length as the product does.

    Args:
        log_ratio_BT: [B, T] log of trained policy / policy that sampled; anything where `mask_BT` is False.
        mask_BT: [B, T] bool, True on response tokens.
        places: of the sequences, each of them whole; None: one a row.
    Source:
        By token: https://fengyao.notion.site/off-policy-rl. By sequence, and the mask by geometric mean:
        https://richardli.xyz/rl-collapse. Mask by token: https://ringtech.notion.site/icepop.
    """
    log_ratio_BT = log_ratio_BT.detach()
    if config.corrects is Correction.NONE:
        return None
    by_sequence = config.corrects is Correction.SEQUENCE
    ratio_BT = torch.exp(_over_sequences(log_ratio_BT, mask_BT, places) if by_sequence else log_ratio_BT)
    weight_BT = ratio_BT.clamp(max=config.truncated_importance_sampling)
    changed_BT, kept_BT = weight_BT < ratio_BT, None
    if config.mask_band is not None:
        mean_BT = log_ratio_BT
        if config.mask_level is Level.SEQUENCE:
            lengths_BT = _over_sequences(torch.ones_like(log_ratio_BT), mask_BT, places)
            mean_BT = _over_sequences(log_ratio_BT, mask_BT, places) / lengths_BT.clamp(min=1.0)
        low, high = config.mask_band
        ratio_BT = torch.exp(mean_BT)
        kept_BT = (ratio_BT >= low) & (ratio_BT <= high)
        changed_BT = changed_BT | ~kept_BT
    return Weights(weight_BT=weight_BT.to(log_ratio_BT.dtype), kept_BT=kept_BT, changed_BT=changed_BT)


def _over_sequences(values_BT: Tensor, mask_BT: Tensor, places: Places | None) -> Tensor:
    """[B, T], at each token the sum over its response; in float64, so that it does not depend on the padding."""
    values_BT = torch.where(mask_BT, values_BT, 0.0).double()
    sums_BT = values_BT.sum(dim=1, keepdim=True).expand_as(values_BT)
    if places is not None:
        sums_BT = torch.zeros_like(values_BT)
        for place in places:
            sums_BT[place] = values_BT[place].sum()
    return sums_BT
