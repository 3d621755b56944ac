"""Importance weights for tokens that were sampled by another policy than the one being trained.

Engines round differently from the learner, and in an asynchronous loop their weights are older. The ratio of a token is
its probability under the trained policy over its probability under the policy that sampled it, both before the step's
first update. The weight of a token multiplies its policy loss; a token outside the band is left out of the loss.

Legend: `B` rows of a micro-batch, `T` predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.grpo.config import Correction, Level, LossConfig

Places = Sequence[tuple[int, slice]]
"""Row and columns of each sequence of a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weight and mask of each token of a micro-batch, without gradient."""

    weight_BT: Tensor
    kept_BT: Tensor | None  # bool, False where the band masks a token out; None: all are kept
    changed_BT: Tensor  # bool, True where the cap or the band changed the token's weight


def corrected(log_ratio_BT: Tensor, mask_BT: Tensor, places: Places, config: LossConfig) -> Weights | None:
    """Compute weights and mask of a micro-batch; None where the loss corrects nothing.

    At token level the weight is min(ratio, cap). At sequence level each token gets the capped product of its response's
    ratios, which is the ratio of the response's two probabilities: the gradient's estimate is then unbiased up to the
    cap. The band bounds a token's ratio, or the geometric mean of a response's ratios, which does not grow with its
    length.

    Args:
        log_ratio_BT: [B, T] log of trained policy / policy that sampled; ignored where `mask_BT` is False.
        mask_BT: [B, T] bool, True on response tokens.
        places: places of the sequences, each of them whole.
    Source:
        Token level: https://fengyao.notion.site/off-policy-rl. Sequence level, and the band on the geometric mean:
        https://richardli.xyz/rl-collapse. Band on tokens: https://ringtech.notion.site/icepop.
    """
    log_ratio_BT = log_ratio_BT.detach()
    if config.corrects is Correction.NONE:
        return None
    by_sequence = config.corrects is Correction.SEQUENCE
    ratio_BT = torch.exp(over_sequences(log_ratio_BT, mask_BT, places) if by_sequence else log_ratio_BT)
    weight_BT = ratio_BT.clamp(max=config.truncated_importance_sampling)
    changed_BT, kept_BT = weight_BT < ratio_BT, None
    if config.mask_band is not None:
        mean_BT = log_ratio_BT
        if config.mask_level is Level.SEQUENCE:
            mean_BT = over_sequences(log_ratio_BT, mask_BT, places) / response_lengths(mask_BT, places)
        low, high = config.mask_band
        ratio_BT = torch.exp(mean_BT)
        kept_BT = (ratio_BT >= low) & (ratio_BT <= high)
        changed_BT = changed_BT | ~kept_BT
    return Weights(weight_BT=weight_BT.to(log_ratio_BT.dtype), kept_BT=kept_BT, changed_BT=changed_BT)


def over_sequences(values_BT: Tensor, mask_BT: Tensor, places: Places) -> Tensor:
    """Sum over each response, at each of its tokens [B, T]; float64, so that the sum does not depend on the padding."""
    values_BT = torch.where(mask_BT, values_BT, 0.0).double()
    sums_BT = torch.zeros_like(values_BT)
    for place in places:
        sums_BT[place] = values_BT[place].sum()
    return sums_BT


def response_lengths(mask_BT: Tensor, places: Places) -> Tensor:
    """Count the tokens of each response, at each of its tokens [B, T], in float64; 1 for a response without tokens."""
    return over_sequences(torch.ones_like(mask_BT, dtype=torch.float64), mask_BT, places).clamp(min=1.0)
