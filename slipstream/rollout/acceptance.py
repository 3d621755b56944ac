"""Acceptance arithmetic: from an engine's cumulative counters to the acceptance of one span of generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from slipstream.records import AcceptanceStats

_COUNTER = "vllm:spec_decode_num_"


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceCounters:
    """An engine's counters since its start. `accepted_by_position[i]` counts accepted draft tokens i (from 0)."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int  # bonus tokens excluded
    accepted_by_position: tuple[int, ...]


def read_counters(metrics: Iterable[Any]) -> AcceptanceCounters:
    """The counters among vLLM's metrics; a missing one is an error, never a zero.

    Raises:
        RuntimeError: there is no such counter.
    """
    by_name = {metric.name.removeprefix(_COUNTER): metric for metric in metrics}
    try:
        return AcceptanceCounters(
            num_drafts=int(by_name["drafts"].value),
            num_draft_tokens=int(by_name["draft_tokens"].value),
            num_accepted_tokens=int(by_name["accepted_tokens"].value),
            accepted_by_position=tuple(int(value) for value in by_name["accepted_tokens_per_pos"].values),
        )
    except KeyError as error:
        raise RuntimeError(f"vLLM reports no counter {_COUNTER}{error.args[0]}: acceptance is unknown") from error


def acceptance_between(before: AcceptanceCounters, after: AcceptanceCounters) -> AcceptanceStats:
    """Acceptance of what was generated between two readings of the counters.

    Raises:
        RuntimeError: the counters ran backwards or contradict each other: the engine was restarted or miscounts.
    """
    positions = tuple(a - b for b, a in zip(before.accepted_by_position, after.accepted_by_position, strict=True))
    delta = AcceptanceCounters(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_by_position=positions,
    )
    return _stats(delta)


def combine(parts: Sequence[AcceptanceStats]) -> AcceptanceStats:
    """Acceptance over several spans or engines, from their summed counts; drafts may differ in length.

    Raises:
        ValueError: there is no part.
    """
    if not parts:
        raise ValueError("parts must hold at least one span, got none")
    return _stats(
        AcceptanceCounters(
            num_drafts=sum(part.num_drafts for part in parts),
            num_draft_tokens=sum(part.num_draft_tokens for part in parts),
            num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
            accepted_by_position=tuple(
                sum(column) for column in zip_longest(*(part.accepted_by_position for part in parts), fillvalue=0)
            ),
        )
    )


def sampling_deviation(stats: AcceptanceStats) -> float:
    """Standard error of the mean acceptance length, from the counts by position alone.

    Of a draft with n accepted tokens, E[n] and E[n^2] follow from P(n >= i): sum of them, and sum of (2 i - 1) of them.
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
    if not consistent or any(count > drafts for count in delta.accepted_by_position):
        raise RuntimeError(f"acceptance counters contradict each other: {delta}")
    return AcceptanceStats(
        num_drafts=drafts,
        num_draft_tokens=proposed,
        num_accepted_tokens=accepted,
        accepted_by_position=delta.accepted_by_position,
        mean_acceptance_length=1.0 + accepted / drafts if drafts else 1.0,
        acceptance_rate=accepted / proposed if proposed else 0.0,
        rate_by_position=tuple(count / drafts if drafts else 0.0 for count in delta.accepted_by_position),
    )
