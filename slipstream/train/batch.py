"""Assembly of scored rollouts into one training batch that accounts for every token, and rollouts that wait for it.

What an asynchronous training has generated or begun but not trained on is a part of its checkpoints. It is written as
JSON, which holds no code, and whose floats come back to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.config import from_mapping, to_mapping
from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.config import GrpoConfig, LossKind
from slipstream.learner.checkpoint import CheckpointError
from slipstream.records.files import write_atomic
from slipstream.records.steps import Mismatch
from slipstream.rewards.reward import RewardResult
from slipstream.types import FinishReason, Rollout, RolloutGroup, TrainBatch

_AGREEMENT = 0.5, 2.0  # lowest and highest ratio of trainer to rollout probability that counts as agreement
Versions = tuple[int, int | None]
"""Versions of policy and draft that engines hold together."""


def have_signal(rewards: Sequence[float], num_groups: int) -> NDArray[np.bool_]:
    """Return for each group whether its rewards differ; equal ones give advantages of 0, which teach nothing."""
    rewards_PG = np.asarray(rewards).reshape(num_groups, -1)
    return (rewards_PG != rewards_PG[:, :1]).any(axis=1)


def chosen(
    groups: Sequence[RolloutGroup], rewards: Sequence[float], *, num_wanted: int
) -> tuple[list[RolloutGroup], list[float]]:
    """Choose the groups that a step trains on, and their rewards, in the order in which they were sampled.

    The first groups with signal are taken; where they are fewer than `num_wanted`, the first groups without signal fill
    the step, so that its size never changes.
    """
    order = np.argsort(~have_signal(rewards, len(groups)), kind="stable")
    kept = np.sort(order[:num_wanted])
    return [groups[index] for index in kept], np.asarray(rewards).reshape(len(groups), -1)[kept].flatten().tolist()


def assemble(
    groups: Sequence[RolloutGroup],
    rewards: Sequence[float],
    *,
    config: GrpoConfig,
    policy_version: int,
    draft_version: int | None,
    max_lag: int = 0,
    published: Collection[Versions] | None = None,
) -> TrainBatch:
    """Join prompts and responses, and center the rewards of each group.

    Args:
        rewards: one a rollout, group by group.
        policy_version: version of the policy that learns from the batch.
        max_lag: number of versions by which a token may be older than `policy_version`.
        published: pairs of policy and draft version that engines held together, which may go further back than
            `max_lag`; None: every policy version had `draft_version`.
    Raises:
        RuntimeError: a token is too old or too new, or no engine ever held its two versions together.
        FloatingPointError: the engine gave a token no finite logprob.
        LookupError: `config` replays routes, and the engine gave a rollout none.
    """
    import torch

    from slipstream.grpo.loss import group_advantages

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    versions = range(max(policy_version - max_lag, 0), policy_version + 1)
    if published is None:
        published = [(version, draft_version) for version in versions]
    _require_versions(rollouts, versions=versions, published=published)
    _require_finite(np.concatenate([np.asarray(rollout.rollout_logprobs) for rollout in rollouts]))
    rewards_PG = torch.tensor(rewards, dtype=torch.float32).view(len(groups), -1)
    advantages_PG = group_advantages(
        rewards_PG, scale_by_std=config.scale_advantages_by_std, leave_one_out=config.loss.kind is LossKind.RLOO
    )
    is_whole = tuple(rollout.finish_reason is not FinishReason.LENGTH for rollout in rollouts)
    prompts = [group.prompt.token_ids for group in groups for _ in group.rollouts]
    return TrainBatch(
        token_ids=tuple(prompt + rollout.token_ids for prompt, rollout in zip(prompts, rollouts, strict=True)),
        prompt_lengths=tuple(len(prompt) for prompt in prompts),
        rollout_logprobs=tuple(rollout.rollout_logprobs for rollout in rollouts),
        advantages=tuple(advantages_PG.flatten().tolist()),
        policy_version=policy_version,
        counts=is_whole if config.loss.filter_overlong and not all(is_whole) else (),
        routes=_routes(rollouts) if config.router_replay else (),
    )


def _routes(rollouts: Sequence[Rollout]) -> tuple[NDArray[np.integer], ...]:
    routes = tuple(rollout.routes for rollout in rollouts if rollout.routes is not None)
    if len(routes) < len(rollouts):
        raise LookupError(
            f"grpo.router_replay needs the routes of {len(rollouts)} rollouts, got those of {len(routes)}"
        )
    return routes


def _require_versions(rollouts: Sequence[Rollout], *, versions: range, published: Collection[Versions]) -> None:
    """Require that every token comes from one of `versions`, with a draft that was published beside that version."""
    for rollout in rollouts:
        known, num_tokens = sum(span.num_tokens for span in rollout.spans), len(rollout.token_ids)
        if known != num_tokens:
            raise RuntimeError(f"each of {num_tokens} tokens of a rollout must carry its version, got {known}")
    found = {(span.policy_version, span.draft_version) for rollout in rollouts for span in rollout.spans}
    stale = {policy for policy, _ in found if policy not in versions}
    if stale:
        wanted = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
        raise RuntimeError(f"rollouts must come from policy {wanted}, got {sorted(stale)}")
    if not found <= set(published):
        policies, drafts = {policy for policy, _ in found}, {draft for _, draft in found}
        wanted = " or ".join(sorted({str(draft) for policy, draft in published if policy in policies}))
        raise RuntimeError(f"rollouts must come from draft version {wanted}, got {drafts}")


def mismatch(rollout_logprobs: Sequence[Sequence[float]], trainer_logprobs: Sequence[NDArray[np.float32]]) -> Mismatch:
    """Compare the rollout and trainer logprobs of every response token; one that is not finite is an error."""
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
        outside_fraction=float(((ratio < _AGREEMENT[0]) | (ratio > _AGREEMENT[1])).mean()),
    )


def _require_finite(logprobs: NDArray[np.float64]) -> None:
    bad = ~np.isfinite(logprobs)
    if bad.any():
        raise FloatingPointError(f"{int(bad.sum())} response tokens have a NaN or infinite logprob")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Rollouts that left the engines together, with their rewards: a whole batch, or one group."""

    index: int  # of the batch, or of the group, over the whole training
    result: GenerationResult
    rewards: RewardResult
    generated_s: float = 0.0  # end of their generation, on this process's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """Rollouts between two steps that are not trained on yet."""

    scored: tuple[Scored, ...] = ()  # in the order of the queue
    under_way: tuple[int, ...] = ()  # indices of submitted groups that are not scored; a resumed attempt restarts them
    published: tuple[Versions, ...] = ()  # versions that `scored` may come from
    num_submitted: int | None = None  # groups submitted by then, as `Submitted` counts them; None: not known

    def to_bytes(self) -> bytes:
        """Serialize all but times on this process's clock."""
        timeless = replace(self, scored=tuple(replace(each, generated_s=0.0) for each in self.scored))
        return json.dumps(to_mapping(timeless), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Pending:
        """Deserialize, or raise `CheckpointError` for damaged bytes."""
        try:
            return from_mapping(cls, json.loads(data))
        except ValueError as error:
            raise CheckpointError(
                f"rollouts that wait for training must be as they were written, got {error!r}"
            ) from error


class Submitted:
    """File with the number of groups ever submitted to engines, a group of several attempts each time.

    By it a resumed attempt counts the groups that were lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, number: int) -> None:
        """Count `number` groups that are submitted now."""
        write_atomic(self._path, str(self.read() + number).encode())

    def read(self) -> int:
        """Number over all attempts so far; 0 before the first."""
        return int(self._path.read_text()) if self._path.exists() else 0
