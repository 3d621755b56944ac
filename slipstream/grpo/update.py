"""Inputs and outcome of one optimizer update, and the split of a step into several updates.

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
    """Inputs of one optimizer update: the rollouts, logprobs of their tokens, and the loss."""

    batch: TrainBatch
    # B, under the policy before the step's first update. None takes the logprobs of the update's own forward pass: they
    # are equal in the first update, so the ratio of the loss is exactly 1.
    trainer_logprobs: Sequence[NDArray[np.float32]] | None
    ref_logprobs: Sequence[NDArray[np.float32]] | None  # B, under the reference policy; None leaves the KL out
    loss: LossConfig
    temperature: float  # sampling temperature of the rollouts
    max_response_tokens: int | None = None  # largest length of a rollout, by which `LossKind.DR_GRPO` divides
    trains_draft: bool = False  # the draft learns from the hidden states of this update's forward pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Outcome of one update, or of all updates of a step."""

    stats: TrainStats
    own_logprobs: Sequence[NDArray[np.float32]] | None  # B, of the forward pass; None: they were given
    draft: DraftUpdate | None = None  # None: no draft was trained


def minibatches(update: Update, count: int) -> list[Update]:
    """Split a step's rollouts, in their order, into `count` updates whose sizes differ by at most one.

    Every update keeps the logprobs from before the first one. From the second update on, the ratio of the loss
    therefore compares the current policy with the policy at the start of the step.

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
    """Combine the updates of a step.

    Loss, KL and clip fraction are means over the tokens that enter the loss, and entropy over all of them; gradient
    norm and learning rate are means over updates.
    """
    if len(updates) == 1:
        return updates[0]
    stats = [update.stats for update in updates]
    counts = [part.num_tokens for part in stats]
    all_counts = [part.num_tokens if part.num_all_tokens is None else part.num_all_tokens for part in stats]
    entropies = [part.entropy for part in stats if part.entropy is not None]
    computed = [part.num_computed_tokens for part in stats if part.num_computed_tokens is not None]

    def by_token(values: Sequence[float]) -> float:
        return float(np.average(values, weights=counts))

    whole = TrainStats(
        loss=by_token([part.loss for part in stats]),
        grad_norm=sum(part.grad_norm for part in stats) / len(stats),
        kl=by_token([part.kl for part in stats]),
        clip_fraction=by_token([part.clip_fraction for part in stats]),
        num_tokens=sum(counts),
        learning_rate=sum(part.learning_rate for part in stats) / len(stats),
        entropy=float(np.average(entropies, weights=all_counts)) if len(entropies) == len(stats) else None,
        num_all_tokens=sum(all_counts),
        num_computed_tokens=sum(computed) if len(computed) == len(stats) else None,
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
    """Select rollouts of an update, as arrays."""
    given, reference = update.trainer_logprobs, update.ref_logprobs
    return replace(
        update,
        batch=part_of_batch(update.batch, indices),
        trainer_logprobs=None if given is None else _rows(given, indices, np.float32),
        ref_logprobs=None if reference is None else _rows(reference, indices, np.float32),
    )


def part_of_batch(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """Select rollouts of a batch, as arrays."""
    routes = batch.routes
    return replace(
        batch,
        token_ids=_rows(batch.token_ids, indices, np.int32),
        prompt_lengths=[batch.prompt_lengths[index] for index in indices],
        rollout_logprobs=_rows(batch.rollout_logprobs, indices, np.float32),
        advantages=[batch.advantages[index] for index in indices],
        counts=[batch.counts[index] for index in indices] if batch.counts else (),
        routes=_rows(routes, indices, routes[0].dtype) if routes and indices else (),
    )


def _rows(rows: Sequence[Any], indices: Sequence[int], dtype: DTypeLike) -> Ragged:
    return Ragged.of([rows[index] for index in indices], dtype)
