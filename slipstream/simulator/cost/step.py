"""Seconds of the learner's stages of a GRPO step, from flops, the peak and a measured efficiency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.simulator.cost.parameters import load_belief
from slipstream.simulator.cost.settings import Setting
from slipstream.types import STAGES, StageTimes

_FORWARD_FLOPS = 2.0  # a parameter and token
_TRAIN_FLOPS = 6.0  # forward and backward, without recomputation


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerEfficiency:
    """How near the learner comes to the dense peak, and what does not scale: from measured steps.

    `logprob` and `train` are fractions of the peak over all tokens, padding included; without a pass for the
    log-probabilities the first is None.
    """

    data_s: float
    prepare_s: float
    logprob: float | None
    train: float
    measured_on: Setting


def learner_efficiency(measured: StageTimes, setting: Setting, *, mean_tokens: float) -> LearnerEfficiency:
    """The efficiency that a measured step implies for a batch of `setting` on all of its GPUs."""
    ideal_s = _ideal_s(setting, setting.num_gpus, mean_tokens)
    return LearnerEfficiency(
        data_s=measured.data_s,
        prepare_s=measured.prepare_s,
        logprob=_FORWARD_FLOPS * ideal_s / measured.logprob_s if measured.logprob_s > 0 else None,
        train=_TRAIN_FLOPS * ideal_s / measured.train_s,
        measured_on=setting,
    )


def learner_stages(
    efficiency: LearnerEfficiency, setting: Setting, *, num_gpus: int, mean_tokens: float, deviation: float = 0.0
) -> StageTimes:
    """A step without its generation: flops over peak and efficiency; data and prepare stay as measured.

    Args:
        mean_tokens: of a response.
        deviation: from the believed ratio of the efficiencies here and where it was measured, in standard deviations
            of its logarithm.
    """
    ratio, log_sd = relative_efficiency(setting, efficiency.measured_on)
    ideal_s = _ideal_s(setting, num_gpus, mean_tokens) / (ratio * math.exp(log_sd * deviation))
    return StageTimes.in_sequence(
        data_s=efficiency.data_s,
        prepare_s=efficiency.prepare_s,
        generation_s=0.0,
        logprob_s=0.0 if efficiency.logprob is None else _FORWARD_FLOPS * ideal_s / efficiency.logprob,
        train_s=_TRAIN_FLOPS * ideal_s / efficiency.train,
    )


def relative_efficiency(setting: Setting, measured_on: Setting) -> tuple[float, float]:
    """How efficient the learner of `setting` is believed to be over that of `measured_on`: median, log sd.

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
