"""What one optimizer update is computed from, and how a step is cut into several.

Legend: `B` rollouts of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from slipstream.grpo.config import LossConfig
from slipstream.ragged import Ragged
from slipstream.records.steps import DraftUpdate, TrainStats
from slipstream.types import TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimizer update: the rollouts, what is known of their tokens, and the loss."""

    batch: TrainBatch
    # B, under the policy before the step's first update; None takes those of the update's own forward pass, which
    # are the same if it is the first: the ratio of the loss is then exactly 1.
    trainer_logprobs: Sequence[NDArray[np.float32]] | None
    ref_logprobs: Sequence[NDArray[np.float32]] | None  # B, under the reference policy; None leaves the KL out
    loss: LossConfig
    temperature: float  # at which the rollouts were sampled
    trains_draft: bool = False  # on the hidden states of this update's forward pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What one update, or a whole step of them, did."""

    stats: TrainStats
    own_logprobs: Sequence[NDArray[np.float32]] | None  # B, of the forward pass; None if the update was given some
    draft: DraftUpdate | None = None  # None: the draft was not trained


def minibatches(update: Update, count: int) -> list[Update]:
    """Cut a step's rollouts into `count` updates, in their order, of sizes that differ by one at most.

    Every update keeps the log-probabilities from before the first one, so from the second on the ratio of the loss is
    that of the policy now to the policy that the step began with.

    Raises:
        ValueError: there are fewer rollouts than updates, or several updates without `trainer_logprobs`.
    """
    num = len(update.batch.token_ids)
    if not 1 <= count <= num:
        raise ValueError(f"a step of {num} rollouts gives 1 to {num} updates, got {count}")
    if count == 1:
        return [update]
    if update.trainer_logprobs is None:
        raise ValueError(f"{count} updates need the trainer_logprobs from before the first, got none")
    bounds = [index * num // count for index in range(count + 1)]
    return [part_of(update, range(start, end)) for start, end in itertools.pairwise(bounds)]


def combined(updates: Sequence[Trained]) -> Trained:
    """A whole step: means over its tokens; of the gradient's norm and the learning rate, over its updates."""
    if len(updates) == 1:
        return updates[0]
    stats = [update.stats for update in updates]
    num_tokens = sum(part.num_tokens for part in stats)

    def by_token(values: Sequence[float]) -> float:
        return sum(value * part.num_tokens for value, part in zip(values, stats, strict=True)) / num_tokens

    entropies = [part.entropy for part in stats if part.entropy is not None]
    whole = TrainStats(
        loss=by_token([part.loss for part in stats]),
        grad_norm=sum(part.grad_norm for part in stats) / len(stats),
        kl=by_token([part.kl for part in stats]),
        clip_fraction=by_token([part.clip_fraction for part in stats]),
        num_tokens=num_tokens,
        learning_rate=sum(part.learning_rate for part in stats) / len(stats),
        entropy=by_token(entropies) if len(entropies) == len(stats) else None,
    )
    return Trained(stats=whole, own_logprobs=None, draft=_combined_draft([update.draft for update in updates]))


def _combined_draft(updates: Sequence[DraftUpdate | None]) -> DraftUpdate | None:
    drafts = [update for update in updates if update is not None]
    if not drafts:
        return None
    num_updates = sum(draft.num_updates for draft in drafts)
    return DraftUpdate(
        loss=sum(draft.loss * draft.num_updates for draft in drafts) / num_updates,
        num_updates=num_updates,
        elapsed_s=sum(draft.elapsed_s for draft in drafts),
    )


def part_of(update: Update, indices: Sequence[int]) -> Update:
    """Some rollouts of an update, in arrays."""
    given, reference = update.trainer_logprobs, update.ref_logprobs
    return replace(
        update,
        batch=part_of_batch(update.batch, indices),
        trainer_logprobs=None if given is None else _rows(given, indices, np.float32),
        ref_logprobs=None if reference is None else _rows(reference, indices, np.float32),
    )


def part_of_batch(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """Some rollouts of a batch, in arrays."""
    return replace(
        batch,
        token_ids=_rows(batch.token_ids, indices, np.int32),
        prompt_lengths=[batch.prompt_lengths[index] for index in indices],
        rollout_logprobs=_rows(batch.rollout_logprobs, indices, np.float32),
        advantages=[batch.advantages[index] for index in indices],
    )


def _rows(rows: Sequence[Any], indices: Sequence[int], dtype: DTypeLike) -> Ragged:
    return Ragged.of([rows[index] for index in indices], dtype)
