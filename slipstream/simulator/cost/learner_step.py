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
