"""Seconds of a GRPO step: the learner's stages from flops and measured efficiency, overlapped with generation.

The asynchronous loops generate on GPUs of their own, with a policy at most `lag` versions old. With r running sequences
of an engine, t(r) seconds a token, N responses a step and B seconds of training beside generation, a step of T seconds
without its refit has (docs/simulator.md derives it)

    one_step_off:  T = max(drained batch, B)
    in_flight:     T >= (N / engines) E[L] t(r) / r            throughput, which a larger r improves
                   T >= (L_max t(r) + B) / (1 + lag)           latency of the longest response, which it worsens

r is bounded by the lag, by the key-value memory, and, where only a whole group frees its slots (`Slots.GROUP`), by the
slots that a group's shorter responses leave empty.

Legend: `R` alternative numbers of running sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from slipstream.simulator import Array
from slipstream.simulator.rollout import (
    Lengths,
    RolloutShape,
    Slots,
    Trace,
    cached_sequences,
    longest_of,
    mean_context,
    mean_longest_of,
    slowest_engine,
)
from slipstream.simulator.settings import Setting, load_belief
from slipstream.types import STAGES, LoopMode, StageTimes

_POINTS = 65  # running batches in a grid search, over the whole range and again around its best point


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """Learner with a measured step on a layout."""

    measured: StageTimes
    setting: Setting
    mean_tokens: float  # mean response tokens of the measured step
    num_gpus: int = 0  # GPUs that trained in it; 0: all of `setting`

    def stages(self, setting: Setting, *, num_gpus: int, mean_tokens: float, deviation: float = 0.0) -> StageTimes:
        """Scale the measured step, without generation, to another layout; data and prepare keep their seconds.

        A stage's seconds are proportional to its flops over peak and efficiency, for all tokens, padding included.

        Args:
            deviation: deviation from the prior's ratio of efficiencies between the two layouts, in standard deviations
                of the ratio's logarithm.
        """
        ratio, log_sd = relative_efficiency(setting, self.setting)
        factor = _ideal_s(setting, num_gpus, mean_tokens) / (ratio * math.exp(log_sd * deviation))
        factor /= _ideal_s(self.setting, self.num_gpus or self.setting.num_gpus, self.mean_tokens)
        logprob_s, train_s = factor * self.measured.logprob_s, factor * self.measured.train_s
        return replace(self.measured, logprob_s=logprob_s, train_s=train_s).with_generation(0.0)


def relative_efficiency(setting: Setting, measured_on: Setting) -> tuple[float, float]:
    """Compute the prior of the learner's efficiency on `setting` over that on `measured_on`: median and log sd."""
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
    """Apply a statistic to each stage's seconds over several steps."""
    by_stage = [step.by_stage() for step in times]
    return StageTimes.in_sequence(**{f"{stage}_s": statistic([each[stage] for each in by_stage]) for stage in STAGES})


def _ideal_s(setting: Setting, num_gpus: int, mean_tokens: float) -> float:
    """Compute the seconds at peak of one flop for each parameter and token of the batch."""
    peak = setting.accelerator.flops_per_s[setting.learner_precision]
    return setting.model_shape.parameters_per_token * setting.learner_tokens(mean_tokens) / (num_gpus * peak)


class Bound(StrEnum):
    """Limit of a step's time."""

    LEARNER = "learner"
    DRAINED = "drained batch"
    LAG = "lag"  # the longest response must end within the lag
    MEMORY = "key-value memory"
    GROUPS = "group slots"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Step with overlapped generation."""

    period_s: float
    step: StageTimes  # generation_s is the exposed part
    bound: Bound


def overlap(
    trainer: StageTimes,
    *,
    lengths: Lengths,
    shape: RolloutShape,
    lag: int,
    seconds: Callable[[Trace], Array],
    mode: LoopMode = LoopMode.IN_FLIGHT,
) -> Overlap:
    """Overlap a trainer's stages with engines that run at most `lag` steps ahead; `trainer.generation_s` is ignored.

    Args:
        seconds: function from a trace to the seconds of each span on one engine, with or without speculation.
        lag: 0 makes the step synchronous.
        mode: mode of an asynchronous loop, used if `lag` is at least 1.
    """
    drained_s = float(seconds(slowest_engine(lengths, shape)).sum())
    busy_s = trainer.other_s - trainer.prepare_s if lag > 0 else 0.0  # generation hides all stages but the refit
    period_s, least_s, bound = drained_s, drained_s, Bound.DRAINED
    if lag > 0 and mode is LoopMode.IN_FLIGHT:
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
    """Find the shortest step that generation allows beside `busy_s` of training, over the number of sequences."""
    per_engine = shape.num_rollouts / shape.num_engines
    mean, longest = lengths.mean_tokens, longest_of(lengths, shape.num_rollouts)
    context = mean_context(lengths, prompt_tokens=shape.prompt_tokens)
    lag_cap = max(1.0, per_engine * (1 + lag) * mean / longest)
    caps = {Bound.LAG: lag_cap, Bound.MEMORY: cached_sequences(lengths, shape)}
    if shape.slots is Slots.GROUP:
        filled = mean / mean_longest_of(lengths, shape.group_size)
        caps[Bound.GROUPS] = max(1.0, per_engine * lag * filled)
    bound = min(caps, key=lambda each: caps[each])

    def period_s(running_R: Array) -> Array:
        # Engines are never drained: the spans are alternatives, and each lasts one mean response.
        trace = Trace(tokens_S=np.full_like(running_R, mean), batch_S=running_R, context_S=running_R * context)
        token_s_R = seconds(trace) / mean
        return np.maximum((longest * token_s_R + busy_s) / (1 + lag), per_engine * mean * token_s_R / running_R)

    running_R = np.linspace(1.0, caps[bound], _POINTS)
    nearest = int(period_s(running_R).argmin())
    nearby = running_R[max(0, nearest - 1)], running_R[min(_POINTS - 1, nearest + 1)]
    running_R = np.append(np.linspace(*nearby, _POINTS), running_R[nearest])
    period_s_R = period_s(running_R)
    best = int(period_s_R.argmin())
    return float(period_s_R[best]), bound if running_R[best] == caps[bound] else Bound.LAG
