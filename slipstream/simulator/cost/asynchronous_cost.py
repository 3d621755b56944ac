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
from slipstream.simulator.cost import Array
from slipstream.simulator.cost.lengths import Lengths, longest_of, mean_longest_of
from slipstream.simulator.cost.rollout import RolloutShape, Slots, Trace, cached_sequences, slowest_engine, steady_state
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


def overlap(  # what generates, what trains, and how they are joined
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
    overlapped = lag > 0 and mode is not LoopMode.SYNCHRONOUS
    busy_s = trainer.other_s - trainer.prepare_s if overlapped else 0.0  # generation hides all stages but the refit
    period_s, least_s, bound = drained_s, drained_s, Bound.DRAINED
    if overlapped and mode is LoopMode.IN_FLIGHT:
        (alone_s, _), (paced_s, paced_bound) = (_pace(lengths, shape, lag, seconds, each) for each in (0.0, busy_s))
        period_s = min(alone_s, drained_s)
        if paced_s <= drained_s:  # else a batch ahead, drained as a synchronous one: lag 1 or more can use it
            least_s, bound = paced_s, paced_bound
    hidden = busy_s > 0 and least_s <= busy_s
    return Overlap(
        period_s=period_s,
        step=trainer.with_generation(max(0.0, least_s - busy_s)),
        bound=Bound.LEARNER if hidden else bound,
    )


def _pace(
    lengths: Lengths, shape: RolloutShape, lag: int, seconds: Callable[[Trace], Array], busy_s: float
) -> tuple[float, Bound]:
    """The shortest step that generation allows beside a trainer of `busy_s`, at the best number of sequences."""
    per_engine = shape.num_rollouts / shape.num_engines
    mean, longest = lengths.mean_tokens, longest_of(lengths, shape.num_rollouts)
    caps = {Bound.LAG: max(1.0, per_engine * (1 + lag) * mean / longest), **_caps(lengths, shape, lag)}
    bound = min(caps, key=lambda each: caps[each])

    def period_s(running_R: Array) -> Array:
        trace = steady_state(lengths, running_S=running_R, prompt_tokens=shape.prompt_tokens)
        token_s_R = seconds(trace) / mean
        return np.maximum((longest * token_s_R + busy_s) / (1 + lag), per_engine * mean * token_s_R / running_R)

    running_R = np.linspace(1.0, caps[bound], _POINTS)
    nearest = int(period_s(running_R).argmin())
    nearby = running_R[max(0, nearest - 1)], running_R[min(_POINTS - 1, nearest + 1)]
    running_R = np.append(np.linspace(*nearby, _POINTS), running_R[nearest])
    period_s_R = period_s(running_R)
    best = int(period_s_R.argmin())
    return float(period_s_R[best]), bound if running_R[best] == caps[bound] else Bound.LAG


def _caps(lengths: Lengths, shape: RolloutShape, lag: int) -> dict[Bound, float]:
    """Sequences that an engine can run on average, by what else limits them than the lag."""
    found = {Bound.MEMORY: cached_sequences(lengths, shape)} if math.isfinite(shape.cache_tokens) else {}
    if shape.slots is Slots.GROUP:
        filled = lengths.mean_tokens / mean_longest_of(lengths, shape.group_size)
        found[Bound.GROUPS] = max(1.0, shape.num_rollouts / shape.num_engines * lag * filled)
    return found
