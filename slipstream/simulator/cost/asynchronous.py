"""Generation that runs beside training, on GPUs of its own, with a policy at most `lag` versions old.

`one_step_off`: a whole batch is generated while the trainer is at work, and both rest while weights are refitted:

    step = refit + max(drained batch, trainer)

`in_flight`: engines are never drained; training waits only for the refit and for the batch that is due. A batch's
responses start when weights are published, and train `lag` publications later. While the trainer waits for its batch
the next ones run on, so in a step of T seconds with a trainer of B the window of a response is (1 + lag) T - B. With r
running sequences of an engine, t(r) seconds a token and N responses a step:

    throughput: T >= (N / engines) E[L] t(r) / r;
    latency:    T >= (L_max t(r) + B) / (1 + lag), for the longest ends in its window.

More running sequences help the first and hurt the second. How many there can be is bounded as well: by the lag itself,
r <= (N / engines) (1 + lag) E[L] / L_max; by the key-value memory; and, where only a whole group that ends makes room
(`Slots.GROUP`), by (N / engines) lag E[L] / E[longest of a group], because the rest of a group's room stands empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from slipstream.config import require
from slipstream.simulator.cost.arrays import Array
from slipstream.simulator.cost.lengths import Lengths, longest_of, mean_longest_of
from slipstream.simulator.cost.rollout import (
    RolloutShape,
    Slots,
    Trace,
    cached_sequences,
    slowest_engine,
    steady_state,
)
from slipstream.types import LoopMode, StageTimes

_POINTS = 65
"""Running batches that are tried, twice: over the whole range, then around the best of it."""


class Bound(StrEnum):
    """What a step's time is bound by."""

    LEARNER = "learner"
    DRAINED = "drained batch"
    LAG = "lag"  # the longest response must end within its window
    MEMORY = "key-value memory"
    GROUPS = "group slots"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How a step's generation is hidden. `period_s`: the shortest step that generation alone could sustain."""

    period_s: float
    step: StageTimes  # its generation_s is the exposed part
    bound: Bound
    running: float  # sequences that an engine runs on average; of a drained batch the most


def overlap(  # noqa: PLR0913  # what generates, what trains, and how they are joined
    trainer: StageTimes,
    *,
    lengths: Lengths,
    shape: RolloutShape,
    lag: int,
    seconds: Callable[[Trace], Array],
    mode: LoopMode = LoopMode.IN_FLIGHT,
) -> Overlap:
    """Join a trainer's stages (`trainer.generation_s` is ignored) with engines that run `lag` steps ahead at most.

    Args:
        seconds: time of each span of a trace on one engine, with or without speculation.
        lag: 0 waits for every batch, as a synchronous step does.
        mode: of the loop, where `lag` is at least 1.
    """
    require(lag >= 0, "lag", "must be >= 0", lag)
    drained_s = float(seconds(slowest_engine(lengths, shape)).sum())
    drained = _Pace(seconds=drained_s, running=float(shape.per_engine), bound=Bound.DRAINED)
    if lag == 0 or mode is LoopMode.SYNCHRONOUS:
        return _joined(trainer, drained, period_s=drained_s, busy_s=0.0)
    busy_s = trainer.other_s - trainer.prepare_s  # the refit is the one stage that generation does not hide
    if mode is LoopMode.ONE_STEP_OFF:
        return _joined(trainer, drained, period_s=drained_s, busy_s=busy_s)
    alone, paced = (_pace(lengths, shape, lag, seconds, each_s) for each_s in (0.0, busy_s))
    # A batch ahead, drained as a synchronous one, is always allowed: lag 1 or more can use it.
    best = min(paced, drained, key=lambda pace: pace.seconds)
    return _joined(trainer, best, period_s=min(alone.seconds, drained_s), busy_s=busy_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pace:
    """The shortest step that generation allows."""

    seconds: float
    running: float
    bound: Bound


def _joined(trainer: StageTimes, pace: _Pace, *, period_s: float, busy_s: float) -> Overlap:
    hidden = 0 < busy_s and pace.seconds <= busy_s
    return Overlap(
        period_s=period_s,
        step=trainer.with_generation(max(0.0, pace.seconds - busy_s)),
        bound=Bound.LEARNER if hidden else pace.bound,
        running=pace.running,
    )


def _pace(
    lengths: Lengths, shape: RolloutShape, lag: int, seconds: Callable[[Trace], Array], busy_s: float
) -> _Pace:
    """The best number of running sequences beside a trainer of `busy_s`, and the step that it allows."""
    per_engine = shape.num_rollouts / shape.num_engines
    mean, longest = lengths.mean_tokens, longest_of(lengths, shape.num_rollouts)
    caps = {Bound.LAG: max(1.0, per_engine * (1 + lag) * mean / longest), **_caps(lengths, shape, lag)}
    bound = min(caps, key=lambda each: caps[each])

    def period_s(running_R: Array) -> Array:
        trace = steady_state(lengths, running_S=running_R, prompt_tokens=shape.prompt_tokens)
        token_s_R = seconds(trace) / mean
        return np.maximum((longest * token_s_R + busy_s) / (1 + lag), per_engine * mean * token_s_R / running_R)

    running_R = np.linspace(1.0, caps[bound], _POINTS)
    for _ in range(2):
        period_s_R = period_s(running_R)
        best = int(period_s_R.argmin())
        nearby = running_R[max(0, best - 1)], running_R[min(_POINTS - 1, best + 1)]
        found = _Pace(
            seconds=float(period_s_R[best]),
            running=float(running_R[best]),
            bound=bound if running_R[best] == caps[bound] else Bound.LAG,
        )
        running_R = np.unique(np.append(np.linspace(*nearby, _POINTS - 1), running_R[best]))
        running_R = np.pad(running_R, (0, _POINTS - len(running_R)), mode="edge")
    return found


def _caps(lengths: Lengths, shape: RolloutShape, lag: int) -> dict[Bound, float]:
    """Sequences that an engine can run on average, by what else limits them than the lag."""
    found = {Bound.MEMORY: cached_sequences(lengths, shape)} if math.isfinite(shape.cache_tokens) else {}
    if shape.slots is Slots.GROUP:
        filled = lengths.mean_tokens / mean_longest_of(lengths, shape.group_size)
        found[Bound.GROUPS] = max(1.0, shape.num_rollouts / shape.num_engines * lag * filled)
    return found
