"""Choice of the draft length by measured time: a sweep before RL, and the autopilot during RL. Length 0 drafts nothing.

Sweep (`sweep`, `choose`). Engines with different draft lengths k, and one without a draft, generate the same prompts in
rounds, in another order each round. Each generation begins without a prefix cache, as the step after a refit does. A
busy machine slows all engines of a round alike, so each round gives one speedup for each k, and the median decides;
acceptance explains the choice but does not make it. Where not all engines fit into memory at once, the middle of the
candidates is measured first, and then the neighbours of the fastest k at the largest batch: speedup rises and falls
once over k. A schedule needs every k.

Schedule (`schedule`). The cost of a k at a running batch is the time in which every running rollout gains one token. An
engine whose drafting is switched off still runs the draft's first pass to keep its KV cache complete, so the sweep
measures that cost apart, as `SWITCHED_OFF`. What remains of a generation, above all the prompts, takes longer in an
engine with a draft, and counts in the gain that a schedule must have.

Autopilot (`decide`). The cost of a step is its generation time over its generated tokens. A run stays in one mode,
drafting or not, and measures the other one in single steps (probes): once both modes can be compared, then at growing
intervals, and at once when the current mode seems slower. It switches when each of the last `PATIENCE_STEPS` costs
more, by `_MARGIN`, than two probes no older than those steps, so one slow step switches nothing. The decision depends
on the steps' records alone, so a resumed run decides like an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp, log
from statistics import fmean, median
from typing import Annotated, NamedTuple, Protocol, TypeVar

from pydantic import Field

from slipstream.config import Checked, Fix, Fraction, Int, NonNegativeInt, PositiveInt, require, rule
from slipstream.drafts.methods import DraftSampling
from slipstream.engine.acceptance import combine
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engines, GenerationResult, RunningTime
from slipstream.records.stages import RunningPoint, SamplingPoint, SweepPoint, TuningRecord
from slipstream.records.steps import NUM_WARMUP_STEPS, AutopilotStep, ScheduleEntry
from slipstream.statistics import spread
from slipstream.types import Prompt

PATIENCE_STEPS = 3
"""Successive steps that must lose before the autopilot switches drafting."""
_MARGIN = 0.05  # extra cost of a step, as a fraction, from which a mode loses
_PROBE_EVERY_STEPS = 8  # steps from a switch to the first probe of the other mode; each probe doubles the interval
_NUM_PROBES = 2  # latest probes, which must agree
_MAX_BACK_OFF = 8  # times `_PROBE_EVERY_STEPS`

SWITCHED_OFF = -1
"""Stands for a k: length 0 in an engine that has a draft. 0 itself is an engine without one."""

Key = TypeVar("Key", int, DraftSampling)
"""Tells engines that are compared apart: their k, or their kind of drafts."""

Round = Mapping[int, GenerationResult]
"""Generations of one round by k; all engines of a round generate the same prompts."""

Switch = Callable[[Engines, int], None]
"""Sets the draft length of an engine that has a draft; 0 switches drafting off."""


class Forgetful(Engines, Protocol):
    """Engines that can forget: else one that met the prompts before would gain by it."""

    def forget(self) -> None:
        """Forget earlier generations: the prompts' KV cache, answers to draft from, and response lengths."""
        ...


def _rises(values: Sequence[int]) -> bool:
    return list(values) == sorted(set(values))


class TuningConfig(Checked, path="tuning"):
    """Sweep of draft lengths. The batch of training should be the largest of `batch_sizes`."""

    candidate_ks: tuple[NonNegativeInt, ...] = (0, 1, 2, 3, 5, 7)
    """Numbers of draft tokens that are compared, rising from 0, the engine without a draft."""
    batch_sizes: Annotated[
        tuple[Int, ...], rule("must rise from 1, without repeats", lambda sizes: _rises(sizes) and sizes[:1] > (0,))
    ] = (16, 64)
    """Running batches that every k is timed at, multiples of `grpo.group_size`."""
    num_repeats: PositiveInt = 3
    """Rounds of the sweep; a k is judged by the median of their speedups."""
    max_response_tokens: Annotated[PositiveInt, Fix("null takes sampling.max_response_tokens")] | None = None
    """Tokens after which the sweep cuts off a response; null takes `sampling.max_response_tokens`."""
    max_live_engines: Annotated[Int, Field(ge=2)] = 2
    """Engines that fit into memory at once; as many as `candidate_ks` compares all k in every round."""
    gpu_memory_utilization: Annotated[Fraction, Fix("null takes engine.gpu_memory_utilization")] | None = None
    """Share of a GPU's memory that each of these engines takes; null takes `engine.gpu_memory_utilization`."""

    def _check(self) -> None:
        ks = self.candidate_ks
        self._require(0 in ks, "candidate_ks", "must hold 0, the baseline")
        self._require(_rises(ks), "candidate_ks", "must rise, without repeats")
        self._require(len(ks) > 1, "candidate_ks", "must hold a k to compare with 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLength:
    """Draft length of an engine: one k, or a schedule by running batch; and how tokens of that length are chosen.

    `num_speculative_tokens` is the largest k, 0 for an engine without a draft. An empty schedule means one k.
    """

    num_speculative_tokens: int
    schedule: tuple[ScheduleEntry, ...] = ()
    sampling: DraftSampling = DraftSampling.PROBABILISTIC

    @property
    def label(self) -> str:
        """The k as text, or `by_batch` for several."""
        ks = {entry.num_speculative_tokens for entry in self.schedule}
        return "by_batch" if len(ks) > 1 else str(self.num_speculative_tokens)


def length_of(record: TuningRecord, *, by_batch: bool) -> DraftLength:
    """Return the tuned schedule if one is asked for and has several k, else the best fixed k."""
    ks = {entry.num_speculative_tokens for entry in record.schedule}
    sampling = DraftSampling(record.sampling)
    if by_batch and len(ks) > 1:
        return DraftLength(num_speculative_tokens=max(ks), schedule=record.schedule, sampling=sampling)
    return DraftLength(num_speculative_tokens=record.chosen_k, sampling=sampling)


def described(schedule: Sequence[ScheduleEntry]) -> str:
    """Format a schedule as `1-8: 7, 9-48: 3`."""
    return ", ".join(f"{entry.batch_from}-{entry.batch_to}: {entry.num_speculative_tokens}" for entry in schedule)


def constant(k: int) -> tuple[ScheduleEntry, ...]:
    """Return a schedule of one k, which vLLM extends to any batch."""
    return (ScheduleEntry(batch_from=1, batch_to=1, num_speculative_tokens=k),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Measurements of a sweep: points by k and batch size, and generations by round."""

    points: tuple[SweepPoint, ...]
    rounds: tuple[Round, ...]


def sweep(
    start_engine: Callable[[int], AbstractContextManager[Forgetful]],
    prompts: Sequence[Prompt],
    *,
    config: TuningConfig,
    sampling: SamplingConfig,
    seed: int,
    group_size: int = 1,
    switch: Switch | None = None,
    on_points: Callable[[Sequence[SweepPoint]], None] = lambda points: None,
) -> Sweep:
    """Measure lengths at every batch size, with up to `max_live_engines` engines of which one works at a time.

    Args:
        start_engine: starts an engine with k draft tokens (0: without a draft); several threads call it.
        prompts: at least as many as the largest batch needs.
        group_size: rollouts a prompt; every batch size is a multiple of it.
        switch: sets the draft length of an engine, to measure `SWITCHED_OFF` and every k; None leaves that out.
        on_points: called with the points of each batch size as soon as they are known, except those of k = 0.
    Returns:
        The points by k, then by batch size.
    """
    largest = config.batch_sizes[-1]
    at_hand = len(prompts) * group_size
    require(largest <= at_hand, "tuning.batch_sizes", f"must be at most the {at_hand} rollouts of the prompts", largest)
    points: list[SweepPoint] = []
    rounds: list[Round] = []
    baselines: dict[int, list[GenerationResult]] = {batch: [] for batch in config.batch_sizes}
    first = _batches(prompts, largest // group_size, 1)  # a first generation pays for compilation and allocations
    drafting, size = [k for k in config.candidate_ks if k], config.max_live_engines - 1
    with ExitStack() as outer:
        baseline = _started([0], start_engine, outer)
        _rounds(baseline, first, sampling, group_size, seed=0)
        while ks := _next_ks(drafting, points, size, batch=largest, takes_all=switch is not None):
            with ExitStack() as inner:
                started = _started(ks, start_engine, inner)
                if switch is not None and ks[-1] == drafting[-1]:
                    started[SWITCHED_OFF] = _SwitchedOff(engine=started[ks[-1]], k=ks[-1], switch=switch)
                _rounds(started, first, sampling, group_size, seed=0)
                engines = {**baseline, **started}
                for batch in config.batch_sizes:
                    batches = _batches(prompts, batch // group_size, config.num_repeats)
                    results = _rounds(engines, batches, sampling, group_size, seed)
                    baselines[batch] += results[0]
                    rounds += ({k: results[k][i] for k in results} for i in range(config.num_repeats))
                    known = [_sweep_point(k, batch, results[k], results[0]) for k in ks]
                    points += known
                    on_points(known)
    points += [_sweep_point(0, batch, results, results) for batch, results in baselines.items()]
    return Sweep(points=tuple(sorted(points, key=lambda point: (point.k, point.batch))), rounds=tuple(rounds))


def choose(
    points: Sequence[SweepPoint], *, config: TuningConfig, batch: int, rounds: Sequence[Round] = ()
) -> TuningRecord:
    """Choose the fastest k at the measured batch size nearest to `batch`, and a schedule over all running batches.

    Args:
        rounds: generations of the sweep; without them the schedule is the chosen k throughout.
    """
    nearest = _nearest(config, batch)
    at_batch = [point for point in points if point.batch == nearest]
    best = max(at_batch, key=lambda point: (point.speedup, -point.k))  # of equals the smaller k
    chosen_k, reason = best.k, f"k=0 wins at batch {nearest}: no draft length is faster"
    if chosen_k:
        reason = (
            f"k={best.k} is fastest at batch {nearest}: {best.speedup:.2f}x autoregressive "
            f"({best.autoregressive_s:.2f} -> {best.generation_s:.2f} s, AL {best.mean_acceptance_length:.2f})"
        )
    largest = config.batch_sizes[-1]
    running = running_points(rounds, chosen_k=chosen_k, largest=largest)
    table = schedule(running, rounds, chosen_k=chosen_k, largest=largest)
    return TuningRecord(
        chosen_k=chosen_k,
        reason=reason,
        points=tuple(points),
        schedule=table,
        running=running,
        schedule_gain=expected_gain(running, table, rounds, chosen_k=chosen_k),
    )


def compare(
    start_engine: Callable[[DraftSampling], AbstractContextManager[Forgetful]],
    prompts: Sequence[Prompt],
    *,
    config: TuningConfig,
    sampling: SamplingConfig,
    seed: int,
    batch: int,
    group_size: int = 1,
) -> tuple[SamplingPoint, ...]:
    """Measure probabilistic and greedy drafts at the batch size of the sweep that is nearest to `batch`."""
    kinds, size = (DraftSampling.PROBABILISTIC, DraftSampling.GREEDY), _nearest(config, batch)
    batches = _batches(prompts, size // group_size, config.num_repeats)
    with ExitStack() as stack:
        engines = _started(kinds, start_engine, stack)
        _rounds(engines, batches[:1], sampling, group_size, seed=0)
        results = _rounds(engines, batches, sampling, group_size, seed)
    points = {kind: _sweep_point(0, size, results[kind], results[kinds[0]]) for kind in kinds}
    return tuple(
        SamplingPoint(
            sampling=kind.value,
            batch=size,
            generation_s=point.generation_s,
            generation_p10_s=point.generation_p10_s,
            generation_p90_s=point.generation_p90_s,
            num_repeats=point.num_repeats,
            mean_acceptance_length=point.mean_acceptance_length,
            gain=point.speedup,
        )
        for kind, point in points.items()
    )


def with_faster_drafts(record: TuningRecord, points: Sequence[SamplingPoint]) -> TuningRecord:
    """Return the record with both kinds of drafts and the choice of the faster one."""
    best, greedy = (max(points, key=lambda point: point.gain), points[-1])
    reason = (
        f"{record.reason}; {best.sampling} drafts: greedy ones generate {greedy.gain:.2f}x as fast as probabilistic "
        f"ones ({points[0].generation_s:.2f} -> {greedy.generation_s:.2f} s)"
    )
    return replace(record, reason=reason, sampling=best.sampling, samplings=tuple(points))


def _nearest(config: TuningConfig, batch: int) -> int:
    return min(config.batch_sizes, key=lambda size: (abs(size - batch), size))


def _batches(prompts: Sequence[Prompt], size: int, count: int) -> list[list[Prompt]]:
    """Return `count` batches of `size` prompts each, cycling through `prompts`."""
    return [[prompts[(i * size + j) % len(prompts)] for j in range(size)] for i in range(count)]


def _next_ks(
    drafting: Sequence[int], points: Sequence[SweepPoint], size: int, *, batch: int, takes_all: bool
) -> list[int]:
    """Choose up to `size` of the lengths `drafting` to measure next; empty at the end of the sweep.

    Args:
        batch: batch size by whose speedup lengths are compared.
        takes_all: measure every length, in order.
    """
    known = {point.k: point.speedup for point in points if point.batch == batch}
    left = [k for k in drafting if k not in known]
    if takes_all or size >= len(drafting):
        return left[:size]
    if not known:
        first = (len(drafting) - size) // 2
        return list(drafting[first : first + size])
    best = drafting.index(max(known, key=lambda k: known[k]))
    return [k for k in drafting[max(0, best - 1) : best + 2] if k in left][:size]


def _started(
    keys: Sequence[Key], start_engine: Callable[[Key], AbstractContextManager[Forgetful]], stack: ExitStack
) -> dict[Key, Forgetful]:
    """Start engines; those that started before one failed end with the stack."""
    with ThreadPoolExecutor(len(keys)) as pool:
        return dict(zip(keys, pool.map(lambda key: stack.enter_context(start_engine(key)), keys), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class _SwitchedOff:
    """An engine whose drafting is switched off while it generates through this wrapper."""

    engine: Forgetful
    k: int
    switch: Switch

    def forget(self) -> None:
        self.engine.forget()

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        self.switch(self.engine, 0)
        result = self.engine.generate(prompts, sampling=sampling, group_size=group_size, seed=seed)
        self.switch(self.engine, self.k)
        return result


def _rounds(
    engines: Mapping[Key, Forgetful], batches: list[list[Prompt]], sampling: SamplingConfig, group_size: int, seed: int
) -> dict[Key, list[GenerationResult]]:
    """Generate every batch on every engine, each round in another order."""
    results: dict[Key, list[GenerationResult]] = {key: [] for key in engines}
    order = list(engines)
    for number, prompts in enumerate(batches):
        first = number % len(order)
        for key in order[first:] + order[:first]:
            engines[key].forget()
            result = engines[key].generate(prompts, sampling=sampling, group_size=group_size, seed=seed + number)
            results[key].append(result)
    return results


def _sweep_point(
    k: int, batch: int, results: Sequence[GenerationResult], baseline: Sequence[GenerationResult]
) -> SweepPoint:
    """Summarize `results` beside the baseline's results of the same rounds."""
    own = spread([result.generation_s for result in results])
    ratios = [other.generation_s / result.generation_s for other, result in zip(baseline, results, strict=True)]
    acceptance = [result.acceptance for result in results if result.acceptance is not None]
    merged = combine(acceptance) if acceptance else None
    lengths, baseline_lengths = _response_lengths(results), _response_lengths(baseline)
    return SweepPoint(
        k=k,
        batch=batch,
        generation_s=own.median,
        generation_p10_s=own.p10,
        generation_p90_s=own.p90,
        num_repeats=len(results),
        autoregressive_s=spread([result.generation_s for result in baseline]).median,
        speedup=spread(ratios).median,
        mean_acceptance_length=1.0 if merged is None else merged.mean_acceptance_length,
        rate_by_position=() if merged is None else merged.rate_by_position,
        mean_response_tokens=fmean(num for each in lengths for num in each),
        autoregressive_response_tokens=fmean(num for each in baseline_lengths for num in each),
        longest_response_tokens=median(map(max, lengths)),
        autoregressive_longest_tokens=median(map(max, baseline_lengths)),
    )


def _response_lengths(results: Sequence[GenerationResult]) -> list[list[int]]:
    """Return the number of tokens of each response, by generation."""
    return [[len(r.token_ids) for group in result.groups for r in group.rollouts] for result in results]


def running_points(rounds: Sequence[Round], *, chosen_k: int, largest: int) -> tuple[RunningPoint, ...]:
    """Compute cost, speedup and gain of every k in every range of running batches up to `largest`.

    Ranges double: 1, 2, 3 to 4, 5 to 8, ... Two k are compared in the rounds that both took part in. A k that shared no
    round with the chosen k, because too few engines live at once, is compared with it through k = 0.
    """
    ks = sorted({k for each in rounds for k in each})
    points = []
    for batches in _ranges(largest):
        costs = {k: _costs(rounds, k, batches) for k in ks}
        points += [_running_point(k, batches, costs, chosen_k) for k in ks if costs[k]]
    return tuple(points)


def schedule(
    points: Sequence[RunningPoint], rounds: Sequence[Round], *, chosen_k: int, largest: int, min_gain: float = 1.03
) -> tuple[ScheduleEntry, ...]:
    """Schedule the fastest k of each range, or the chosen k throughout if the expected gain is below `min_gain`.

    Only gains that hold in several rounds count. Length 0 counts by its cost in an engine with a draft. Where
    speculation lost as a whole (`chosen_k` 0), a schedule needs that cost to be measured.
    """
    fixed = (ScheduleEntry(batch_from=1, batch_to=largest, num_speculative_tokens=chosen_k),)
    if chosen_k == 0 and not any(point.is_switched_off for point in points):
        return fixed
    best = [(batches, _best(points, batches, chosen_k)) for batches in _ranges(largest)]
    table = tuple(
        ScheduleEntry(batch_from=group[0][0][0], batch_to=group[-1][0][1], num_speculative_tokens=k)
        for k, group in ((k, list(same)) for k, same in groupby(best, key=lambda each: each[1]))
    )
    return table if expected_gain(points, table, rounds, chosen_k=chosen_k) >= min_gain else fixed


def expected_gain(
    points: Sequence[RunningPoint], table: Sequence[ScheduleEntry], rounds: Sequence[Round], *, chosen_k: int
) -> float:
    """Generation time of the chosen k over that of the schedule, from the measured times; 1 if they are the same.

    Outside decoding, where prompts are computed, the schedule takes what its engine does: that of its largest k.
    """
    num_rounds = sum(chosen_k in each for each in rounds)
    spent = num_rounds * _rest_s(rounds, chosen_k)
    after = num_rounds * _rest_s(rounds, max(entry.num_speculative_tokens for entry in table))
    for batches in {(point.batch_from, point.batch_to) for point in points}:
        seconds = sum(time.elapsed_s for each in rounds for time in _within(each, chosen_k, batches))
        k = next(e.num_speculative_tokens for e in table if e.batch_from <= batches[0] <= e.batch_to)
        gain = next((p.gain for p in points if _is_of(p, k) and p.batch_from == batches[0]), 1.0)
        spent, after = spent + seconds, after + seconds / gain
    return spent / after if after and len(table) > 1 else 1.0


def _rest_s(rounds: Sequence[Round], k: int) -> float:
    """Return the mean seconds of a k's generations outside decoding; every k has rounds of the same batch sizes."""
    results = [each[k] for each in rounds if k in each]
    rests = [max(0.0, result.generation_s - sum(t.elapsed_s for t in result.running)) for result in results]
    return fmean(rests) if rests else 0.0


def _ranges(largest: int) -> Iterator[tuple[int, int]]:
    start, end = 1, 1
    while start <= largest:
        yield start, min(end, largest)
        start, end = end + 1, 2 * end


def _within(results: Round, k: int, batches: tuple[int, int]) -> list[RunningTime]:
    """Return the step times of one k within a range of running batches."""
    times = results[k].running if k in results else ()
    return [time for time in times if batches[0] <= time.num_running <= batches[1]]


class _Cost(NamedTuple):
    """Cost of one k in one round within one range of running batches."""

    num_steps: int
    num_gained: float  # tokens gained by each running rollout
    token_s: float


def _costs(rounds: Sequence[Round], k: int, batches: tuple[int, int]) -> dict[int, _Cost]:
    """Compute the costs by round; rounds without these running batches are left out."""
    found = {}
    for number, each in enumerate(rounds):
        if times := _within(each, k, batches):
            gained = sum(time.num_tokens / time.num_running for time in times)
            elapsed_s = sum(time.elapsed_s for time in times)
            found[number] = _Cost(sum(time.num_steps for time in times), gained, elapsed_s / gained)
    return found


def _running_point(
    k: int, batches: tuple[int, int], costs: Mapping[int, Mapping[int, _Cost]], chosen_k: int
) -> RunningPoint:
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
    """Log ratios of the others' cost to this one's, by common round."""
    return [log(others[number].token_s / own[number].token_s) for number in sorted(others.keys() & own.keys())]


def _estimate(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Ratio whose logarithm is the sum of the samples' means, and the ratio from the samples' minima.

    The ratio is 1 where nothing is known. The lower ratio is 0 unless every sample has several rounds.
    """
    gain = exp(sum(map(fmean, samples))) if all(samples) else 1.0
    return gain, exp(sum(map(min, samples))) if min(map(len, samples)) > 1 else 0.0


def _is_of(point: RunningPoint, k: int) -> bool:
    """Return True if this point measured `k` as a schedule can have it."""
    return point.k == k and (k > 0 or point.is_switched_off)


def _best(points: Sequence[RunningPoint], batches: tuple[int, int], chosen_k: int) -> int:
    here = [point for point in points if (point.batch_from, point.batch_to) == batches and _is_of(point, point.k)]
    known = [point for point in here if point.gain_low > 0 or point.k == chosen_k]
    return max(known, key=lambda point: (point.gain, point.k == chosen_k)).k if known else chosen_k


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decision of the autopilot on the next step."""

    speculates: bool
    is_probe: bool = False
    has_switched: bool = False
    own_ms: float | None = None  # median cost of the current mode over the last steps; None before `PATIENCE_STEPS`
    other_ms: float | None = None  # latest cost of the other mode


def decide(steps: Sequence[AutopilotStep]) -> Decision:
    """Stay in the current mode, probe the other one for a step, or switch, after `steps`."""
    patience, now = PATIENCE_STEPS, len(steps)
    speculates, interval, last_look = True, _PROBE_EVERY_STEPS, 0
    costs: dict[bool, list[tuple[int, float]]] = {True: [], False: []}  # index and cost of steps, by mode
    for index, step in enumerate(steps):
        if step.is_probe:
            interval, last_look = min(2 * interval, _MAX_BACK_OFF * _PROBE_EVERY_STEPS), index
        elif step.speculates != speculates:
            speculates, interval, last_look = step.speculates, _PROBE_EVERY_STEPS, index
        if index >= NUM_WARMUP_STEPS:  # warm-up steps pay for allocations
            costs[step.speculates].append((index, step.token_ms))
    own = [cost for _, cost in costs[speculates][-patience:]]
    if len(own) < patience:
        return Decision(speculates=speculates)
    probes = costs[not speculates][-_NUM_PROBES:]
    loses = [min(own) > (1 + _MARGIN) * cost for _, cost in probes]
    are_fresh = all(now - index <= patience for index, _ in probes)
    has_switched = len(probes) == _NUM_PROBES and all(loses) and are_fresh
    is_probe = not has_switched and (not probes or loses[-1] or now - last_look >= interval)
    return Decision(
        speculates=speculates != (has_switched or is_probe),
        is_probe=is_probe,
        has_switched=has_switched,
        own_ms=median(own),
        other_ms=probes[-1][1] if probes else None,
    )
