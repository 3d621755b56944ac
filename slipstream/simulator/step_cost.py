"""Seconds of a GRPO step: the learner's stages by flops and measured efficiency, and generation joined with them.

Generation that runs beside training, on GPUs of its own, with a policy at most `lag` versions old.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from slipstream.config import require
from slipstream.simulator import Array
from slipstream.simulator.rollout import (
    Lengths,
    RolloutShape,
    Slots,
    Trace,
    cached_sequences,
    longest_of,
    mean_longest_of,
    slowest_engine,
    steady_state,
)
from slipstream.simulator.settings import Setting, load_belief
from slipstream.types import STAGES, LoopMode, StageTimes

_FORWARD_FLOPS = 2.0  # a parameter and token
_TRAIN_FLOPS = 6.0  # forward and backward, without recomputation


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """A learner of which a step was measured, on all GPUs of `setting`."""

    measured: StageTimes
    setting: Setting
    mean_tokens: float  # of a response of that step

    def stages(self, setting: Setting, *, num_gpus: int, mean_tokens: float, deviation: float = 0.0) -> StageTimes:
        """A step without its generation: flops over peak and efficiency; data and prepare stay as measured.

        The efficiency is the measured one, over all tokens, padding included; a stage that was left out stays so.

        Args:
            mean_tokens: of a response.
            deviation: from the believed ratio of the efficiencies of `setting` and where it was measured, in standard
                deviations of its logarithm.
        """
        ratio, log_sd = relative_efficiency(setting, self.setting)
        ideal_s = _ideal_s(setting, num_gpus, mean_tokens) / (ratio * math.exp(log_sd * deviation))
        own_ideal_s = _ideal_s(self.setting, self.setting.num_gpus, self.mean_tokens)

        def scaled_s(flops: float, measured_s: float) -> float:
            return flops * ideal_s / (flops * own_ideal_s / measured_s) if measured_s > 0 else 0.0

        return StageTimes.in_sequence(
            data_s=self.measured.data_s,
            prepare_s=self.measured.prepare_s,
            generation_s=0.0,
            logprob_s=scaled_s(_FORWARD_FLOPS, self.measured.logprob_s),
            train_s=scaled_s(_TRAIN_FLOPS, self.measured.train_s),
        )


def relative_efficiency(setting: Setting, measured_on: Setting) -> tuple[float, float]:
    """Believed efficiency of the learner of `setting` over that of `measured_on`: median, log sd.

    By their hardware and whether they have experts; 1 and 0 where they are alike.
    """
    log_ratio, variance = 0.0, 0.0
    if setting.hardware != measured_on.hardware:
        here, there = (load_belief("learner", each.hardware) for each in (setting, measured_on))
        log_ratio += math.log(here.median / there.median)
        variance += here.log_sd**2 + there.log_sd**2
    sparse = int(setting.model_shape.num_experts > 0) - int(measured_on.model_shape.num_experts > 0)
    if sparse:
        share = load_belief("experts", "share")
        log_ratio += sparse * math.log(share.median)
        variance += share.log_sd**2
    return math.exp(log_ratio), math.sqrt(variance)


def stagewise(statistic: Callable[[Sequence[float]], float], times: Sequence[StageTimes]) -> StageTimes:
    """`statistic` of each stage over several steps."""
    by_stage = [step.by_stage() for step in times]
    return StageTimes.in_sequence(**{f"{stage}_s": statistic([each[stage] for each in by_stage]) for stage in STAGES})


def _ideal_s(setting: Setting, num_gpus: int, mean_tokens: float) -> float:
    """Seconds of one flop a parameter and token of the batch at the peak."""
    peak = setting.accelerator.flops_per_s[setting.learner_precision]
    return setting.model_shape.parameters_per_token * setting.learner_tokens(mean_tokens) / (num_gpus * peak)


_POINTS = 65
"""Running batches that are tried, twice: over the whole range, then around the best of it."""


class Bound(StrEnum):
    """Bound of a step's time."""

    LEARNER = "learner"
    DRAINED = "drained batch"
    LAG = "lag"  # the longest response must end within its window
    MEMORY = "key-value memory"
    GROUPS = "group slots"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """A step with its hidden generation. `period_s`: the shortest step that generation alone could sustain."""

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
