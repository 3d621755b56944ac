"""The draft length by running batch, from measured times: no rule says that larger batches want shorter drafts.

Rollouts finish, so a generation runs through every running batch from its first to 1. The engines of the sweep say how
long their steps took at each; that of one k beside that of another in the same round says which is faster there. The
cost of a k at a running batch is the time in which every running rollout gains a token: seconds of a step over the
tokens that it gave a rollout.

An engine with a draft that drafts nothing still runs the draft's first pass, which keeps the draft's KV cache whole,
so it is slower than one without a draft. Where a table may switch drafting off, that is measured: `SWITCHED_OFF`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, log, sqrt
from statistics import fmean, median, stdev

from scipy import special

from slipstream.engine.protocol import RunningTime
from slipstream.records.stages import RunningPoint, TuningRecord
from slipstream.records.steps import ScheduleEntry

_CONFIDENCE = 0.99  # one-sided, that a k is faster than the chosen one at a range of running batches

SWITCHED_OFF = -1
"""In the place of a k: length 0 in an engine that has a draft; 0 itself is an engine without one."""

Round = Mapping[int, Sequence[RunningTime]]
"""By k, what its engine's steps took in one round: all engines generated the same prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLength:
    """How long the drafts of an engine are.

    `num_speculative_tokens` is the largest, 0 for an engine without a draft. An empty schedule is one k throughout.
    """

    num_speculative_tokens: int
    schedule: tuple[ScheduleEntry, ...] = ()

    @property
    def label(self) -> str:
        """The k, or `by_batch` if it has several."""
        ks = {entry.num_speculative_tokens for entry in self.schedule}
        return "by_batch" if len(ks) > 1 else str(self.num_speculative_tokens)


def length_of(record: TuningRecord, *, by_batch: bool) -> DraftLength:
    """The tuned table, where one is asked for and it has more than one k; else the best fixed k."""
    ks = {entry.num_speculative_tokens for entry in record.schedule}
    if by_batch and len(ks) > 1:
        return DraftLength(num_speculative_tokens=max(ks), schedule=record.schedule)
    return DraftLength(num_speculative_tokens=record.chosen_k)


def described(schedule: Sequence[ScheduleEntry]) -> str:
    """`1-8: 7, 9-48: 3`."""
    return ", ".join(f"{entry.batch_from}-{entry.batch_to}: {entry.num_speculative_tokens}" for entry in schedule)


def constant(k: int) -> tuple[ScheduleEntry, ...]:
    """A table of one k: vLLM carries it on to any batch."""
    return (ScheduleEntry(batch_from=1, batch_to=1, num_speculative_tokens=k),)


def running_points(rounds: Sequence[Round], *, chosen_k: int, largest: int) -> tuple[RunningPoint, ...]:
    """Every k at every range of running batches that its engine came through, up to `largest`.

    Ranges double: 1, 2, 3 to 4, 5 to 8, ... A k is compared in the rounds in which the other one was there too; one
    that never met the chosen k, as too few engines live at once, is compared with it through k=0.
    """
    return tuple(
        _point(k, batches, costs, chosen_k)
        for batches in _ranges(largest)
        for costs in [{k: _costs(rounds, k, batches) for k in sorted({k for each in rounds for k in each})}]
        for k in costs
        if costs[k]
    )


def schedule(
    points: Sequence[RunningPoint], rounds: Sequence[Round], *, chosen_k: int, largest: int, min_gain: float
) -> tuple[ScheduleEntry, ...]:
    """In each range the chosen k, or the fastest of those that beat it with confidence; one k if that gains too little.

    Length 0 takes a range by its cost in an engine with a draft. Where speculation lost as a whole, `chosen_k` 0, no
    length is free in such an engine, so nothing has the benefit of the doubt: each range goes to what was the fastest
    there, and the gain over all, at these costs, decides. Unless length 0 was measured there is no table then.
    """
    best = [(batches, _best(points, batches, chosen_k)) for batches in _ranges(largest)]
    table = tuple(
        ScheduleEntry(batch_from=group[0][0][0], batch_to=group[-1][0][1], num_speculative_tokens=k)
        for k, group in ((k, list(same)) for k, same in groupby(best, key=lambda each: each[1]))
    )
    if expected_gain(points, table, rounds, chosen_k=chosen_k) >= min_gain:
        return table
    return (ScheduleEntry(batch_from=1, batch_to=largest, num_speculative_tokens=chosen_k),)


def expected_gain(
    points: Sequence[RunningPoint], table: Sequence[ScheduleEntry], rounds: Sequence[Round], *, chosen_k: int
) -> float:
    """Decoding time of the chosen k over that of the table, by the measured times; 1 if they are the same."""
    spent = after = 0.0
    for batches in {(point.batch_from, point.batch_to) for point in points}:
        seconds = sum(time.elapsed_s for each in rounds for time in _within(each.get(chosen_k, ()), batches))
        k = next(e.num_speculative_tokens for e in table if e.batch_from <= batches[0] <= e.batch_to)
        gain = next((p.gain for p in points if _is_of(p, k) and p.batch_from == batches[0]), 1.0)
        spent, after = spent + seconds, after + seconds / gain
    return spent / after if after and len(table) > 1 else 1.0


def _ranges(largest: int) -> Iterator[tuple[int, int]]:
    start, end = 1, 1
    while start <= largest:
        yield start, min(end, largest)
        start, end = end + 1, 2 * end


def _within(times: Iterable[RunningTime], batches: tuple[int, int]) -> list[RunningTime]:
    return [time for time in times if batches[0] <= time.num_running <= batches[1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cost:
    """Of one k in one round, at one range of running batches."""

    num_steps: int
    num_gained: float  # tokens of a rollout
    elapsed_s: float

    @property
    def token_s(self) -> float:
        return self.elapsed_s / self.num_gained


def _costs(rounds: Sequence[Round], k: int, batches: tuple[int, int]) -> dict[int, _Cost]:
    """By round; without those that never came to these batches."""
    found = {}
    for number, each in enumerate(rounds):
        times = _within(each.get(k, ()), batches)
        if times:
            found[number] = _Cost(
                num_steps=sum(time.num_steps for time in times),
                num_gained=sum(time.num_tokens / time.num_running for time in times),
                elapsed_s=sum(time.elapsed_s for time in times),
            )
    return found


def _point(k: int, batches: tuple[int, int], costs: Mapping[int, Mapping[int, _Cost]], chosen_k: int) -> RunningPoint:
    own = costs[k]
    steps = sum(cost.num_steps for cost in own.values())
    speedups = _log_ratios(costs.get(0, {}), own)
    chosen = costs.get(chosen_k, {})
    gains = [_log_ratios(chosen, own)]
    if not gains[0]:
        gains = [speedups, [-each for each in _log_ratios(costs.get(0, {}), chosen)]]
    gain, low = _estimate(gains)
    return RunningPoint(
        k=max(k, 0),
        is_switched_off=k == SWITCHED_OFF,
        batch_from=batches[0],
        batch_to=batches[1],
        num_rounds=len(own),
        num_steps=steps,
        token_ms=1e3 * median(cost.token_s for cost in own.values()),
        tokens_per_step=sum(cost.num_gained for cost in own.values()) / steps,
        speedup=exp(fmean(speedups)) if speedups else None,
        gain=gain,
        gain_low=low,
    )


def _log_ratios(others: Mapping[int, _Cost], own: Mapping[int, _Cost]) -> list[float]:
    """Logarithms of the others' cost over this one's, round by round."""
    return [log(others[number].token_s / own[number].token_s) for number in sorted(others.keys() & own.keys())]


def _estimate(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The ratio whose logarithm is the sum of the samples' means, and its lower bound by Student's t.

    A ratio of 1 and a bound of 0 where nothing is known; the fewest rounds of a sample count as degrees of freedom.
    """
    if not all(samples):
        return 1.0, 0.0
    center = sum(fmean(logs) for logs in samples)
    num = min(len(logs) for logs in samples)
    if num < 2:
        return exp(center), 0.0
    error = sqrt(sum(stdev(logs) ** 2 / len(logs) for logs in samples))
    return exp(center), exp(center - float(special.stdtrit(num - 1, _CONFIDENCE)) * error)


def _is_of(point: RunningPoint, k: int) -> bool:
    """It was measured in an engine that a table can have draft `k` tokens."""
    return point.k == k and (k > 0 or point.is_switched_off)


def _best(points: Sequence[RunningPoint], batches: tuple[int, int], chosen_k: int) -> int:
    here = [point for point in points if (point.batch_from, point.batch_to) == batches and _is_of(point, point.k)]
    if chosen_k:
        default = next((point.gain for point in here if point.k == chosen_k), 1.0)
        better = [point for point in here if point.k != chosen_k and point.gain_low > default]
    else:
        has_choice = any(point.is_switched_off for point in points)
        better = [point for point in here if has_choice and point.gain_low > 0.0]  # by more rounds than one
    return max(better, key=lambda point: point.gain).k if better else chosen_k
