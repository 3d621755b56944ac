"""What an execution has cost so far, from the spools of its tasks: no server is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slipstream.tracking.spool import Event, read_spool
from slipstream.tracking.tracker import spool_directory

GPUS_TAG = "num_gpus"
"""Tag of a task's run: the GPUs that are reserved while it runs."""

_MS_PER_HOUR = 3_600_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Time in which at least one task ran, and the GPUs' time over all tasks; both in hours."""

    hours: float
    gpu_hours: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    start_ms: int
    end_ms: int
    num_gpus: int


def spent(root: Path, execution: str, *, now_ms: int) -> Spent:
    """What the tasks of `execution` took, each attempt from its start to its last sign of life.

    Args:
        root: the run root, under which the spools lie.
        now_ms: the end of an attempt that still goes on, if it has logged nothing later.
    """
    attempts = [
        attempt
        for path in sorted(spool_directory(root).glob("*.jsonl"))
        for attempt in _attempts(_events(path), execution=execution, now_ms=now_ms)
    ]
    return Spent(
        hours=_union_ms(attempts) / _MS_PER_HOUR,
        gpu_hours=sum((a.end_ms - a.start_ms) * a.num_gpus for a in attempts) / _MS_PER_HOUR,
    )


def _events(path: Path) -> list[Event]:
    events, offset = [], 0
    while (part := read_spool(path, offset=offset)).end_offset > offset:
        offset = part.end_offset
        events += part.events
    return events


def _attempts(events: Iterable[Event], *, execution: str, now_ms: int) -> list[_Attempt]:
    """One spool's attempts. One that was killed has no end: it is counted up to the last thing that it logged."""
    found: list[_Attempt] = []
    start_ms, last_ms, num_gpus = None, 0, 0
    for event in events:
        if event.header is not None:
            if not event.header.key.startswith(f"{execution}/"):
                return []
            if start_ms is not None:
                found.append(_Attempt(start_ms=start_ms, end_ms=last_ms, num_gpus=num_gpus))
            start_ms, num_gpus = event.time_ms, int(event.header.tags.get(GPUS_TAG, "0"))
        last_ms = event.time_ms
        if event.kind == "end" and start_ms is not None:
            found.append(_Attempt(start_ms=start_ms, end_ms=last_ms, num_gpus=num_gpus))
            start_ms = None
    if start_ms is not None:
        found.append(_Attempt(start_ms=start_ms, end_ms=max(last_ms, now_ms), num_gpus=num_gpus))
    return found


def _union_ms(attempts: Iterable[_Attempt]) -> int:
    """Length of the union of all attempts: arms that run side by side count once."""
    total, covered_to = 0, 0
    for attempt in sorted(attempts, key=lambda attempt: attempt.start_ms):
        total += max(0, attempt.end_ms - max(attempt.start_ms, covered_to))
        covered_to = max(covered_to, attempt.end_ms)
    return total
