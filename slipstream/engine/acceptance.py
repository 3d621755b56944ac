"""Acceptance of a span of generation, from vLLM's counts of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from slipstream.records.steps import AcceptanceStats


def acceptance_of(steps: Iterable[Any], *, num_positions: int) -> AcceptanceStats:
    """Sum the counts of steps, each vLLM's `SpecDecodingStats`; `num_positions` are the tokens of the longest draft."""
    total = np.zeros(3 + 2 * num_positions, dtype=np.int64)
    for step in steps:
        by_position = (*step.num_accepted_tokens_per_pos, *step.num_draft_tokens_per_pos)
        total += (step.num_drafts, step.num_draft_tokens, step.num_accepted_tokens, *by_position)
    drafts, proposed, accepted, *positions = total.tolist()
    return _stats(drafts, proposed, accepted, tuple(positions[:num_positions]), tuple(positions[num_positions:]))


def combine(parts: Sequence[AcceptanceStats]) -> AcceptanceStats:
    """Sum the counts of several spans or engines, at least one; drafts may differ in length."""
    assert parts, "at least one span"
    differ = len({len(part.accepted_by_position) for part in parts}) > 1
    is_counted = differ or any(part.drafted_by_position for part in parts)
    drafted = [part.drafted_by_position or (part.num_drafts,) * len(part.accepted_by_position) for part in parts]
    return _stats(
        sum(part.num_drafts for part in parts),
        sum(part.num_draft_tokens for part in parts),
        sum(part.num_accepted_tokens for part in parts),
        _summed([part.accepted_by_position for part in parts]),
        _summed(drafted) if is_counted else (),
    )


def _summed(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))


def sampling_deviation(stats: AcceptanceStats) -> float:
    """Compute the standard error of the mean acceptance length from the counts by position.

    A draft has n accepted tokens: E[n] is the sum of P(n >= i), and E[n^2] the sum of (2 i - 1) P(n >= i).
    """
    if stats.num_drafts == 0:
        return 0.0
    reached = np.asarray(stats.accepted_by_position, dtype=np.float64) / stats.num_drafts
    weights = 2 * np.arange(1, len(reached) + 1) - 1
    variance = float((weights * reached).sum() - reached.sum() ** 2)
    return float(np.sqrt(max(variance, 0.0) / stats.num_drafts))


def _stats(
    drafts: int,
    proposed: int,
    accepted: int,
    accepted_by_position: tuple[int, ...],
    drafted_by_position: tuple[int, ...],
) -> AcceptanceStats:
    """Check the counts of a span, each as `AcceptanceStats` has it, and rate them."""
    drafted = drafted_by_position or (drafts,) * len(accepted_by_position)  # uncounted, all have one length
    positions = tuple(zip(accepted_by_position, drafted, strict=True))
    consistent = 0 <= accepted <= proposed and drafts >= 0 and sum(accepted_by_position) == accepted
    possible = all(a <= d <= drafts for a, d in positions)
    counted = not drafted_by_position or sum(drafted) == proposed
    if not (consistent and possible and counted):
        raise RuntimeError(
            f"acceptance counts contradict each other: {accepted} of {proposed} tokens in {drafts} drafts, by position "
            f"{accepted_by_position} of {drafted}"
        )
    return AcceptanceStats(
        num_drafts=drafts,
        num_draft_tokens=proposed,
        num_accepted_tokens=accepted,
        accepted_by_position=accepted_by_position,
        mean_acceptance_length=1.0 + accepted / drafts if drafts else 1.0,
        acceptance_rate=accepted / proposed if proposed else 0.0,
        rate_by_position=tuple(a / d if d else 0.0 for a, d in positions),
        drafted_by_position=drafted_by_position,
    )
