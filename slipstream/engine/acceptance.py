"""Acceptance of a span of generation, computed from an engine's cumulative counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from slipstream.records.steps import AcceptanceStats

_COUNTER = "vllm:spec_decode_num_"


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceCounters:
    """Counters of an engine since its start.

    `accepted_by_position[i]` counts the accepted draft tokens at position i (from 0). `drafted_by_position[i]` counts
    the drafts with a token at position i; an empty tuple means that all drafts had one length.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int  # bonus tokens excluded
    accepted_by_position: tuple[int, ...]
    drafted_by_position: tuple[int, ...] = ()


def read_counters(metrics: Iterable[Any], *, drafted_by_position: Sequence[int] = ()) -> AcceptanceCounters:
    """Read the counters from vLLM's metrics; a missing counter is an error, never a zero.

    Args:
        drafted_by_position: drafts by position, for which vLLM has no metric.
    Raises:
        RuntimeError: vLLM reports no such counter.
    """
    by_name = {metric.name.removeprefix(_COUNTER): metric for metric in metrics}
    try:
        return AcceptanceCounters(
            num_drafts=int(by_name["drafts"].value),
            num_draft_tokens=int(by_name["draft_tokens"].value),
            num_accepted_tokens=int(by_name["accepted_tokens"].value),
            accepted_by_position=tuple(int(value) for value in by_name["accepted_tokens_per_pos"].values),
            drafted_by_position=tuple(drafted_by_position),
        )
    except KeyError as error:
        raise RuntimeError(f"vLLM reports no counter {_COUNTER}{error.args[0]}: acceptance is unknown") from error


def acceptance_between(before: AcceptanceCounters, after: AcceptanceCounters) -> AcceptanceStats:
    """Compute the acceptance of the generation between two readings of the counters.

    Raises:
        RuntimeError: a counter fell, or counters contradict each other: the engine was restarted or miscounts.
    """
    positions = tuple(a - b for b, a in zip(before.accepted_by_position, after.accepted_by_position, strict=True))
    delta = AcceptanceCounters(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_by_position=positions,
        drafted_by_position=tuple(
            a - b for b, a in zip(before.drafted_by_position, after.drafted_by_position, strict=True)
        ),
    )
    return _stats(delta)


def combine(parts: Sequence[AcceptanceStats]) -> AcceptanceStats:
    """Sum the counts of several spans or engines; drafts may differ in length.

    Raises:
        ValueError: `parts` is empty.
    """
    if not parts:
        raise ValueError("parts must hold at least one span, got none")
    differ = len({len(part.accepted_by_position) for part in parts}) > 1
    is_counted = differ or any(part.drafted_by_position for part in parts)
    return _stats(
        AcceptanceCounters(
            num_drafts=sum(part.num_drafts for part in parts),
            num_draft_tokens=sum(part.num_draft_tokens for part in parts),
            num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
            accepted_by_position=_summed([part.accepted_by_position for part in parts]),
            drafted_by_position=_summed([_drafted(part) for part in parts]) if is_counted else (),
        )
    )


def _summed(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))


def _drafted(part: AcceptanceStats | AcceptanceCounters) -> tuple[int, ...]:
    """Count the drafts with a token at each position: all drafts where they have one length."""
    return part.drafted_by_position or (part.num_drafts,) * len(part.accepted_by_position)


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


def _stats(delta: AcceptanceCounters) -> AcceptanceStats:
    drafts, proposed, accepted = delta.num_drafts, delta.num_draft_tokens, delta.num_accepted_tokens
    consistent = 0 <= accepted <= proposed and drafts >= 0 and sum(delta.accepted_by_position) == accepted
    drafted = _drafted(delta)
    possible = all(a <= d <= drafts for a, d in zip(delta.accepted_by_position, drafted, strict=True))
    counted = not delta.drafted_by_position or sum(drafted) == proposed
    if not (consistent and possible and counted):
        raise RuntimeError(f"acceptance counters contradict each other: {delta}")
    return AcceptanceStats(
        num_drafts=drafts,
        num_draft_tokens=proposed,
        num_accepted_tokens=accepted,
        accepted_by_position=delta.accepted_by_position,
        mean_acceptance_length=1.0 + accepted / drafts if drafts else 1.0,
        acceptance_rate=accepted / proposed if proposed else 0.0,
        rate_by_position=tuple(a / d if d else 0.0 for a, d in zip(delta.accepted_by_position, drafted, strict=True)),
        drafted_by_position=delta.drafted_by_position,
    )
