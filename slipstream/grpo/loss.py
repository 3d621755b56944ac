"""Group-relative advantages and the policy loss.

Legend: `P` prompts, `G` rollouts per prompt; `B` sequences of a micro-batch, `T` predicted tokens (positions 1 .. of
the sequence).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.grpo.config import Correction, KlEstimator, LossConfig, LossKind
from slipstream.grpo.correction import Places, Weights, over_sequences, response_lengths


def group_advantages(
    rewards_PG: Tensor, *, scale_by_std: bool = False, leave_one_out: bool = False, eps: float = 1e-6
) -> Tensor:
    """Center each prompt's rewards on its group mean, or on the mean of the group's other rollouts.

    Args:
        rewards_PG: [P, G] float, one scalar reward a rollout.
        scale_by_std: divide by the group's standard deviation (GRPO, arXiv:2402.03300);
            False keeps the mean-only baseline (Dr. GRPO, arXiv:2503.20783).
        leave_one_out: compare each reward with the mean of the G - 1 others (RLOO, arXiv:2402.14740), which is the
            difference from the group mean times G / (G - 1).
        eps: constant that is added to the standard deviation.
    Returns:
        [P, G]; a group of equal rewards gets exactly 0.
    Raises:
        ValueError: the rewards are not two-dimensional, or G < 2, for one rollout has no baseline.
    """
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] < 2:
        raise ValueError(f"rewards must be [P, G] with G >= 2, got shape {tuple(rewards_PG.shape)}")
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if leave_one_out:
        centered_PG = centered_PG * (rewards_PG.shape[1] / (rewards_PG.shape[1] - 1))
    if scale_by_std:
        centered_PG = centered_PG / (rewards_PG.std(dim=1, keepdim=True) + eps)
    # The mean of G equal numbers may differ from them in the last bit, and dividing by eps would make that a signal.
    return centered_PG.masked_fill(torch.eq(rewards_PG, rewards_PG[:, :1]).all(dim=1, keepdim=True), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Contribution of one micro-batch to a step; every field is summed over micro-batches and ranks."""

    loss: Tensor  # scalar with gradient; the sum over the whole step is divided by `divisor`
    num_clipped: Tensor  # scalar, tokens whose gradient the clip removes; with `cispo`, whose weight it changes
    kl_sum: Tensor  # scalar, sum over tokens of the KL's estimate; 0 without a reference


def divisor(kind: LossKind, *, num_tokens: int, num_responses: int, max_response_tokens: int | None) -> int:
    """Return the number by which the sum of `policy_loss` over all micro-batches and ranks is divided.

    Args:
        num_tokens: response tokens of the whole update. Tokens that the correction masks out are counted, because the
            weight of the other tokens must not depend on them.
        max_response_tokens: largest length of a response, the constant of `dr_grpo`.
    Raises:
        ValueError: `dr_grpo` without `max_response_tokens`.
    """
    if kind in (LossKind.DAPO, LossKind.CISPO):
        return num_tokens
    if kind is not LossKind.DR_GRPO:
        return num_responses
    if max_response_tokens is None:
        raise ValueError("loss kind 'dr_grpo' needs max_response_tokens")
    return num_responses * max_response_tokens


def policy_loss(
    logprobs_BT: Tensor,
    *,
    trainer_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    config: LossConfig,
    places: Places,
    weights: Weights | None = None,
    ref_logprobs_BT: Tensor | None = None,
) -> PolicyLoss:
    """Compute the policy loss of one micro-batch in the form that `LossKind` describes.

    A KL is added to each token's loss, so it is averaged as the loss is. The sum over the micro-batches of any split,
    divided by `divisor` of the whole update, is the loss of the undivided update.

    Args:
        logprobs_BT: [B, T] logprobs under the policy being trained, with gradient.
        trainer_logprobs_BT: [B, T] logprobs that the same learner computed before this batch's first update.
        advantages_BT: [B, T], or a shape that broadcasts to it, such as [B, 1].
        mask_BT: [B, T] bool, True on response tokens.
        places: places of the sequences, each of them whole.
        weights: weights of `correction.corrected`; None: the loss corrects nothing.
        ref_logprobs_BT: [B, T] logprobs under the reference policy; None leaves the KL out.
    Raises:
        ValueError: the config has a correction and `weights` is None, or a KL and `ref_logprobs_BT` is None.
    Source:
        Clipped loss: PPO, arXiv:1707.06347; the other kinds: `LossKind`. Estimators of the KL: `KlEstimator`.
    """
    # `where` before `exp`: 0 times the gradient of an overflow at a prompt's token is nan.
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - trainer_logprobs_BT, 0.0)
    if config.kind is LossKind.GSPO:
        mean_BT = over_sequences(log_ratio_BT, mask_BT, places) / response_lengths(mask_BT, places)
        log_ratio_BT = mean_BT.to(logprobs_BT.dtype)
    loss_BT, is_clipped_BT = _by_token(logprobs_BT, log_ratio_BT, advantages_BT, config)
    if weights is not None:
        loss_BT = loss_BT * weights.weight_BT
    elif config.corrects is not Correction.NONE:
        raise ValueError(f"correction {config.corrects.value!r} needs weights")
    kl_sum = logprobs_BT.new_zeros(())
    if ref_logprobs_BT is not None:
        gap_BT = torch.where(mask_BT, ref_logprobs_BT - logprobs_BT, 0.0)
        kl_BT = _kl(gap_BT, config.kl_estimator)
        loss_BT = loss_BT + config.kl_coefficient * kl_BT
        kl_sum = _masked_sum(kl_BT.detach(), mask_BT)
    elif config.kl_coefficient > 0.0:
        raise ValueError(f"kl_coefficient {config.kl_coefficient} needs ref_logprobs")
    if config.kind in (LossKind.GRPO, LossKind.GSPO):
        loss_BT = loss_BT / response_lengths(mask_BT, places).to(logprobs_BT.dtype)
    counts_BT = mask_BT if weights is None or weights.kept_BT is None else mask_BT & weights.kept_BT
    return PolicyLoss(loss=_masked_sum(loss_BT, counts_BT), num_clipped=(is_clipped_BT & mask_BT).sum(), kl_sum=kl_sum)


def _by_token(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Loss of each token [B, T] before any mean, and bool [B, T]: the clip acts on the token."""
    if config.kind is LossKind.RLOO:
        return -logprobs_BT * advantages_BT, torch.zeros_like(logprobs_BT, dtype=torch.bool)
    ratio_BT = torch.exp(log_ratio_BT)
    clipped_BT = ratio_BT.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    if config.kind is LossKind.CISPO:
        return -clipped_BT.detach() * advantages_BT * logprobs_BT, clipped_BT != ratio_BT
    gain_BT, clipped_gain_BT = ratio_BT * advantages_BT, clipped_BT * advantages_BT
    return -torch.minimum(gain_BT, clipped_gain_BT), clipped_gain_BT < gain_BT


def _kl(gap_BT: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate the KL [B, T] from the logprobs under the reference less those under the policy."""
    if estimator is KlEstimator.K1:
        return -gap_BT
    if estimator is KlEstimator.K2:
        return gap_BT.square() / 2.0
    return torch.exp(gap_BT) - gap_BT - 1.0


def _masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # `where` instead of a product: padding may hold inf or nan, and 0 * inf is nan.
    return torch.where(mask_BT, values_BT, 0.0).sum()
