"""From scored rollouts to one training batch, with every token accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slipstream.records import Mismatch
from slipstream.types import RolloutGroup, TrainBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def assemble(
    groups: Sequence[RolloutGroup],
    rewards: Sequence[float],
    *,
    policy_version: int,
    draft_version: int | None,
    scale_by_std: bool,
) -> TrainBatch:
    """Join prompts and responses and centre the rewards of each group.

    Args:
        rewards: one a rollout, group by group.
    Raises:
        RuntimeError: a rollout was made by another version of policy or draft.
        FloatingPointError: the engine gave a token no finite logprob.
    """
    import torch

    from slipstream.grpo.advantages import group_advantages

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    stale = {rollout.policy_version for rollout in rollouts} - {policy_version}
    if stale:
        raise RuntimeError(f"rollouts must come from policy version {policy_version}, got {sorted(stale)}")
    drafts = {rollout.draft_version for rollout in rollouts}
    if drafts != {draft_version}:
        raise RuntimeError(f"rollouts must come from draft version {draft_version}, got {drafts}")
    _require_finite(np.concatenate([np.asarray(rollout.rollout_logprobs) for rollout in rollouts]))
    rewards_PG = torch.tensor(rewards, dtype=torch.float32).view(len(groups), -1)
    advantages_PG = group_advantages(rewards_PG, scale_by_std=scale_by_std)
    prompts = [group.prompt.token_ids for group in groups for _ in group.rollouts]
    return TrainBatch(
        token_ids=tuple(prompt + rollout.token_ids for prompt, rollout in zip(prompts, rollouts, strict=True)),
        prompt_lengths=tuple(len(prompt) for prompt in prompts),
        rollout_logprobs=tuple(rollout.rollout_logprobs for rollout in rollouts),
        advantages=tuple(advantages_PG.flatten().tolist()),
        policy_version=policy_version,
    )


def mismatch(
    rollout_logprobs: Sequence[Sequence[float]],
    trainer_logprobs: Sequence[NDArray[np.float32]],
    *,
    band: tuple[float, ...] = (0.5, 2.0),
) -> Mismatch:
    """Compare the two logprobs of every response token.

    Args:
        band: lowest and highest ratio of trainer to rollout probability that counts as agreement.
    Raises:
        FloatingPointError: one of them is NaN or infinite.
    """
    rollout = np.concatenate([np.asarray(values, dtype=np.float64) for values in rollout_logprobs])
    trainer = np.concatenate(list(trainer_logprobs)).astype(np.float64)
    gap = rollout - trainer
    _require_finite(gap)
    ratio = np.exp(-gap)
    return Mismatch(
        k1=float(gap.mean()),
        k3=float((ratio - 1.0 + gap).mean()),
        mean=float(np.abs(gap).mean()),
        largest=float(np.abs(gap).max()),
        outside_fraction=float(((ratio < band[0]) | (ratio > band[1])).mean()),
    )


def _require_finite(logprobs: NDArray[np.float64]) -> None:
    bad = ~np.isfinite(logprobs)
    if bad.any():
        raise FloatingPointError(f"{int(bad.sum())} response tokens have a NaN or infinite logprob")
