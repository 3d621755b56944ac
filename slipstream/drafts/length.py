"""Draft length by measured time: time decides, acceptance only explains.

Engines with different draft lengths k, and one without a draft, generate the same prompts in turn: round by round, each
round in another order. However busy the machine is in a round, all of them feel it, so a round gives one speedup
for each k, and k is judged by the median of these. As in training a batch is a few prompts with a group of rollouts
each; every round takes the next prompts.

Where the length may follow the running batch, an engine with a draft is also measured while it drafts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated

from slipstream.config import Checked, PositiveFloat, Rule, ge, require
from slipstream.drafts import schedule
from slipstream.drafts.schedule import SWITCHED_OFF, Round
from slipstream.engine.acceptance import combine
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engines, GenerationResult
from slipstream.records.stages import SweepPoint, TuningRecord
from slipstream.statistics import spread
from slipstream.types import Prompt

EngineFactory = Callable[[int], AbstractContextManager[Engines]]
"""Starts an engine with k draft tokens (0: without a draft) and ends it with the block."""

Switch = Callable[[Engines, int], None]
"""Has an engine with a draft draft so many tokens from now on; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Who is told how a sweep goes.

    Attributes:
        on_points: the points of a batch size as soon as they are known.
        on_generated: each of the `num_generations` that are measured when it is done.
    """

    on_points: Callable[[Sequence[SweepPoint]], None] = lambda points: None
    on_generated: Callable[[], None] = lambda: None


_NOBODY = Listener()


def _rises(values: Sequence[int]) -> bool:
    return list(values) == sorted(set(values))


_RISES_FROM_1 = Rule(
    "must rise from 1, without repeats", lambda sizes: len(sizes) > 0 and _rises(sizes) and sizes[0] > 0
)


@dataclass(frozen=True, kw_only=True)
class TuningConfig(Checked, path="tuning"):
    """What is swept. The running batch of training should be among `batch_sizes`."""

    candidate_ks: tuple[int, ...] = (0, 1, 2, 3, 5, 7)
    batch_sizes: Annotated[tuple[int, ...], _RISES_FROM_1] = (16, 64)
    num_repeats: Annotated[int, ge(1)] = 3  # rounds, of every batch size
    # Engines that fit into memory at once; as many as `candidate_ks` compares all k at once.
    max_live_engines: Annotated[int, ge(2)] = 2
    # Engines that start at once; on a GPU each measures the free memory as it starts.
    num_starting: Annotated[int, ge(1)] = 1
    min_speedup: PositiveFloat = 1.0  # a k that is not faster than this loses to k=0
    # A table by running batch that decodes less than so much faster is none.
    min_schedule_gain: Annotated[float, ge(1)] = 1.03

    def _check(self) -> None:
        ks = self.candidate_ks
        self._require(0 in ks, "candidate_ks", "must hold 0, the baseline")
        self._require(_rises(ks) and ks[0] >= 0, "candidate_ks", "must rise, without repeats")
        self._require(len(ks) > 1, "candidate_ks", "must hold a k to compare with 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What a sweep measured: by k and batch size, and by round what every engine's steps took."""

    points: tuple[SweepPoint, ...]
    rounds: tuple[Round, ...]


def sweep(
    start_engine: EngineFactory,
    prompts: Sequence[Prompt],
    *,
    config: TuningConfig,
    sampling: SamplingConfig,
    seed: int,
    group_size: int = 1,
    switch: Switch | None = None,
    listener: Listener = _NOBODY,
) -> Sweep:
    """Measure every k at every batch size; up to `max_live_engines` live at a time, and only one of them works.

    Args:
        prompts: enough for the largest batch at least.
        group_size: rollouts a prompt; every batch size is a multiple of it.
        switch: measures drafting that is switched off too, in the engine of the longest drafts; None: does not.
    Returns:
        The points by k, then by batch size.
    Raises:
        ConfigError: there are fewer prompts, or a batch size is no multiple of the group size.
    """
    largest = config.batch_sizes[-1]
    at_hand = len(prompts) * group_size
    require(largest <= at_hand, "tuning.batch_sizes", f"must be at most the {at_hand} rollouts of the prompts", largest)
    require_groups(config, group_size)
    points: list[SweepPoint] = []
    rounds: list[Round] = []
    baselines: dict[int, list[GenerationResult]] = {batch: [] for batch in config.batch_sizes}

    def start(ks: Sequence[int], stack: ExitStack) -> dict[int, Engines]:
        """Engines by k; those that started before one failed end with the stack."""
        with ThreadPoolExecutor(config.num_starting) as pool:
            engines = dict(zip(ks, pool.map(lambda k: stack.enter_context(start_engine(k)), ks), strict=True))
        for engine in engines.values():
            warm_up(engine)
        return engines

    def warm_up(engine: Engines) -> None:
        """Its first call pays for what is compiled or allocated on first use."""
        engine.generate(prompts[: largest // group_size], sampling=sampling, group_size=group_size, seed=0)

    with ExitStack() as outer:
        baseline = start([0], outer)
        for ks in _chunks(config):
            with ExitStack() as inner:
                engines = {**baseline, **start(ks, inner)}
                if switch is not None and ks[-1] == config.candidate_ks[-1]:
                    engines[SWITCHED_OFF] = _SwitchedOff(engine=engines[ks[-1]], k=ks[-1], switch=switch)
                    warm_up(engines[SWITCHED_OFF])
                for batch in config.batch_sizes:
                    batches = _batches(prompts, batch // group_size, config.num_repeats)
                    results = _rounds(engines, batches, sampling, group_size, seed, listener.on_generated)
                    baselines[batch] += results[0]
                    rounds += ({k: results[k][i].running for k in results} for i in range(config.num_repeats))
                    known = [_point(k, batch, results[k], results[0]) for k in ks]
                    points += known
                    listener.on_points(known)
    points += [_point(0, batch, results, results) for batch, results in baselines.items()]
    return Sweep(points=tuple(sorted(points, key=lambda point: (point.k, point.batch))), rounds=tuple(rounds))


def num_generations(config: TuningConfig, *, switches: bool = False) -> int:
    """How many generations a sweep measures; `switches`: drafting that is switched off among them."""
    engines = sum(1 + len(ks) for ks in _chunks(config)) + switches  # k=0 again beside each group of others
    return engines * len(config.batch_sizes) * config.num_repeats


def choose(
    points: Sequence[SweepPoint], *, config: TuningConfig, batch: int, rounds: Sequence[Round] = ()
) -> TuningRecord:
    """The fastest k at the measured batch nearest to `batch`, and a schedule over all running batches.

    Args:
        rounds: of the sweep; without them the schedule is the chosen k throughout.
    """
    nearest = min(config.batch_sizes, key=lambda size: (abs(size - batch), size))
    best = _fastest([point for point in points if point.batch == nearest], config.min_speedup)
    if best.k == 0:
        reason = f"k=0 wins at batch {nearest}: no draft length is more than {config.min_speedup:.2f}x as fast"
    else:
        reason = (
            f"k={best.k} is fastest at batch {nearest}: {best.speedup:.2f}x autoregressive "
            f"({best.autoregressive_s:.2f} -> {best.generation_s:.2f} s, AL {best.mean_acceptance_length:.2f})"
        )
    largest = config.batch_sizes[-1]
    running = schedule.running_points(rounds, chosen_k=best.k, largest=largest)
    table = schedule.schedule(running, rounds, chosen_k=best.k, largest=largest, min_gain=config.min_schedule_gain)
    return TuningRecord(
        chosen_k=best.k,
        reason=reason,
        points=tuple(points),
        schedule=table,
        running=running,
        schedule_gain=schedule.expected_gain(running, table, rounds, chosen_k=best.k),
    )


def _fastest(points: Sequence[SweepPoint], min_speedup: float) -> SweepPoint:
    """The point with the best speedup over its own interleaved baseline; k=0 unless one beats `min_speedup`."""
    best = max(points, key=lambda point: point.speedup)
    return best if best.k and best.speedup > min_speedup else next(point for point in points if point.k == 0)


def require_groups(config: TuningConfig, group_size: int) -> None:
    """Refuse batches that no whole number of groups fills."""
    uneven = [size for size in config.batch_sizes if size % group_size]
    require(not uneven, "tuning.batch_sizes", f"must be multiples of grpo.group_size {group_size}", uneven)


def _batches(prompts: Sequence[Prompt], size: int, count: int) -> list[list[Prompt]]:
    """`count` times the next `size` prompts, from the start again when they run out."""
    return [[prompts[(i * size + j) % len(prompts)] for j in range(size)] for i in range(count)]


def _chunks(config: TuningConfig) -> Iterator[Sequence[int]]:
    """The k > 0 that live at once, beside k=0."""
    ks, size = [k for k in config.candidate_ks if k], config.max_live_engines - 1
    for start in range(0, len(ks), size):
        yield ks[start : start + size]


@dataclass(frozen=True, kw_only=True, slots=True)
class _SwitchedOff:
    """An engine of k draft tokens that drafts none while this generates."""

    engine: Engines
    k: int
    switch: Switch

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        self.switch(self.engine, 0)
        result = self.engine.generate(prompts, sampling=sampling, group_size=group_size, seed=seed)
        self.switch(self.engine, self.k)
        return result


def _rounds(
    engines: Mapping[int, Engines],
    batches: Sequence[Sequence[Prompt]],
    sampling: SamplingConfig,
    group_size: int,
    seed: int,
    on_generated: Callable[[], None],
) -> dict[int, list[GenerationResult]]:
    """By k what its engine made of each batch; every round starts with another engine."""
    results: dict[int, list[GenerationResult]] = {k: [] for k in engines}
    order = list(engines)
    for number, prompts in enumerate(batches):
        first = number % len(order)
        for k in order[first:] + order[:first]:
            results[k].append(
                engines[k].generate(prompts, sampling=sampling, group_size=group_size, seed=seed + number)
            )
            on_generated()
    return results


def _point(k: int, batch: int, results: Sequence[GenerationResult], baseline: Sequence[GenerationResult]) -> SweepPoint:
    """What `results` say beside the baseline's of the same rounds."""
    own = spread([result.generation_s for result in results])
    ratios = [other.generation_s / result.generation_s for other, result in zip(baseline, results, strict=True)]
    acceptance = [result.acceptance for result in results if result.acceptance is not None]
    merged = combine(acceptance) if acceptance else None
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
        mean_response_tokens=_mean_response_tokens(results),
        autoregressive_response_tokens=_mean_response_tokens(baseline),
        longest_response_tokens=median(map(_longest, results)),
        autoregressive_longest_tokens=median(map(_longest, baseline)),
    )


def _mean_response_tokens(results: Sequence[GenerationResult]) -> float:
    return fmean(length for result in results for length in _lengths(result))


def _longest(result: GenerationResult) -> int:
    return max(_lengths(result))


def _lengths(result: GenerationResult) -> list[int]:
    return [len(rollout.token_ids) for group in result.groups for rollout in group.rollouts]
