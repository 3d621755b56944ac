"""Group-relative advantages. Legend: `P` prompts, `G` rollouts per prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards_PG: Tensor, *, scale_by_std: bool = False, eps: float = 1e-6) -> Tensor:
    """Center each prompt's rewards on its group mean.

    Args:
        rewards_PG: [P, G] float, one scalar reward a rollout.
        scale_by_std: divide by the group's standard deviation (GRPO, arXiv:2402.03300);
            False keeps the mean-only baseline (Dr. GRPO, arXiv:2503.20783).
        eps: added to the standard deviation.
    Returns:
        [P, G]; a group of equal rewards gets exactly 0.
    Raises:
        ValueError: not two-dimensional, or G < 2, for one rollout has no baseline.
    """
    _require_groups(rewards_PG)
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if scale_by_std:
        centered_PG = centered_PG / (rewards_PG.std(dim=1, keepdim=True) + eps)
    # The mean of G equal numbers may differ from them in the last bit, and dividing by eps would make that a signal.
    return centered_PG.masked_fill(_equal_rewards(rewards_PG).unsqueeze(1), 0.0)


def _equal_rewards(rewards_PG: Tensor) -> Tensor:
    return torch.eq(rewards_PG, rewards_PG[:, :1]).all(dim=1)


def _require_groups(rewards_PG: Tensor) -> None:
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] < 2:
        raise ValueError(f"rewards must be [P, G] with G >= 2, got shape {tuple(rewards_PG.shape)}")
