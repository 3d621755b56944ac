"""Draft length by measured time: time decides, acceptance only explains.

For every draft length k and running batch B an engine with k and one without a draft generate the same prompts in
turn (AR, k, AR, k, ...), so that a machine's changing mood falls on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from slipstream.config import require
from slipstream.records import AcceptanceStats, ScheduleEntry, SweepPoint, TuningRecord
from slipstream.rollout.acceptance import combine
from slipstream.rollout.config import SamplingConfig
from slipstream.rollout.engine import RolloutEngine
from slipstream.statistics import spread
from slipstream.types import Prompt

EngineFactory = Callable[[int], AbstractContextManager[RolloutEngine]]
"""Starts an engine with k draft tokens (0: without a draft) and ends it with the block."""


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """What is swept. The running batch of training should be among `batch_sizes`."""

    candidate_ks: tuple[int, ...] = (0, 1, 2, 3, 5, 7)
    batch_sizes: tuple[int, ...] = (16, 64)
    num_repeats: int = 3
    min_speedup: float = 1.0  # a k that is not faster than this loses to k=0

    def __post_init__(self) -> None:
        ks = self.candidate_ks
        require(0 in ks, "tuning.candidate_ks", "must hold 0, the baseline", ks)
        require(list(ks) == sorted(set(ks)) and ks[0] >= 0, "tuning.candidate_ks", "must rise, without repeats", ks)
        require(len(ks) > 1, "tuning.candidate_ks", "must hold a k to compare with 0", ks)
        batches = self.batch_sizes
        require(
            len(batches) > 0 and list(batches) == sorted(set(batches)) and batches[0] > 0,
            "tuning.batch_sizes",
            "must rise from 1, without repeats",
            batches,
        )
        require(self.num_repeats >= 1, "tuning.num_repeats", "must be >= 1", self.num_repeats)
        require(self.min_speedup > 0, "tuning.min_speedup", "must be > 0", self.min_speedup)


def sweep(
    start_engine: EngineFactory,
    prompts: Sequence[Prompt],
    *,
    config: TuningConfig,
    sampling: SamplingConfig,
    seed: int,
    on_point: Callable[[SweepPoint], None] = lambda point: None,
) -> tuple[SweepPoint, ...]:
    """Measure every k at every batch size; two engines live at a time, and only one of them works.

    Args:
        prompts: as many as the largest batch; one rollout each.
    Raises:
        ConfigError: there are fewer prompts.
    """
    largest = config.batch_sizes[-1]
    require(
        len(prompts) >= largest, "tuning.batch_sizes", f"must be at most the {len(prompts)} prompts at hand", largest
    )
    points: list[SweepPoint] = []
    with start_engine(0) as baseline:
        _warm_up(baseline, prompts, config, sampling)
        for k in config.candidate_ks:
            with ExitStack() as stack:
                engine = baseline if k == 0 else stack.enter_context(start_engine(k))
                if k:
                    _warm_up(engine, prompts, config, sampling)
                for batch in config.batch_sizes:
                    point = _measure(k, engine, baseline, prompts[:batch], config.num_repeats, sampling, seed)
                    points.append(point)
                    on_point(point)
    return tuple(points)


def choose(points: Sequence[SweepPoint], *, config: TuningConfig, batch: int) -> TuningRecord:
    """The fastest k at the measured batch nearest to `batch`, and a schedule over all batches."""
    nearest = min(config.batch_sizes, key=lambda size: (abs(size - batch), size))
    best = _fastest([point for point in points if point.batch == nearest], config.min_speedup)
    if best.k == 0:
        reason = f"k=0 wins at batch {nearest}: no draft length is more than {config.min_speedup:.2f}x as fast"
    else:
        reason = (
            f"k={best.k} is fastest at batch {nearest}: {best.speedup:.2f}x autoregressive "
            f"({best.autoregressive_s:.2f} -> {best.generation_s:.2f} s, AL {best.mean_acceptance_length:.2f})"
        )
    return TuningRecord(chosen_k=best.k, reason=reason, points=tuple(points), schedule=tuple(_schedule(points, config)))


def _fastest(points: Sequence[SweepPoint], min_speedup: float) -> SweepPoint:
    """The point with the best speedup over its own interleaved baseline; k=0 unless one beats `min_speedup`."""
    best = max(points, key=lambda point: point.speedup)
    return best if best.k and best.speedup > min_speedup else next(point for point in points if point.k == 0)


def _schedule(points: Sequence[SweepPoint], config: TuningConfig) -> Iterator[ScheduleEntry]:
    """vLLM's batch schedule: each measured batch stands for the sizes up to the middle of the next one."""
    sizes = config.batch_sizes
    start = 1
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        end = size if following is None else (size + following) // 2
        best = _fastest([point for point in points if point.batch == size], config.min_speedup)
        yield ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=best.k)
        start = end + 1


def _warm_up(engine: RolloutEngine, prompts: Sequence[Prompt], config: TuningConfig, sampling: SamplingConfig) -> None:
    """The first call of an engine pays for what is compiled or allocated on first use."""
    engine.generate(prompts[: config.batch_sizes[-1]], sampling=sampling, group_size=1, seed=0)


def _measure(
    k: int,
    engine: RolloutEngine,
    baseline: RolloutEngine,
    prompts: Sequence[Prompt],
    num_repeats: int,
    sampling: SamplingConfig,
    seed: int,
) -> SweepPoint:
    seconds: list[float] = []
    baseline_seconds: list[float] = []
    acceptance: list[AcceptanceStats] = []
    for repeat in range(num_repeats):
        first = baseline.generate(prompts, sampling=sampling, group_size=1, seed=seed + repeat)
        second = engine.generate(prompts, sampling=sampling, group_size=1, seed=seed + repeat)
        baseline_seconds.append(first.generation_s)
        seconds.append(second.generation_s)
        if second.acceptance is not None:
            acceptance.append(second.acceptance)
    own, other = spread(seconds), spread(baseline_seconds)
    merged = combine(acceptance) if acceptance else None
    return SweepPoint(
        k=k,
        batch=len(prompts),
        generation_s=own.median,
        generation_p10_s=own.p10,
        generation_p90_s=own.p90,
        num_repeats=num_repeats,
        autoregressive_s=other.median,
        speedup=other.median / own.median,
        mean_acceptance_length=1.0 if merged is None else merged.mean_acceptance_length,
        rate_by_position=() if merged is None else merged.rate_by_position,
    )
