"""Seconds of a GRPO step from its stages: synchronous, or asynchronous with a bounded policy lag."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require
from slipstream.sim.hardware import Hardware, Precision
from slipstream.sim.models import ModelShape

_FORWARD_FLOPS = 2.0  # a parameter and token
_TRAIN_FLOPS = 6.0  # forward and backward, without recomputation


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Seconds of each stage. `generation_s` is what the step waits for: all of it when synchronous."""

    data_s: float
    prepare_s: float
    generation_s: float
    logprob_s: float
    train_s: float

    @property
    def step_s(self) -> float:
        """The stages run one after another."""
        return self.other_s + self.generation_s

    @property
    def other_s(self) -> float:
        """All stages but generation."""
        return self.data_s + self.prepare_s + self.logprob_s + self.train_s

    @property
    def generation_share(self) -> float:
        """Generation as a fraction of the step."""
        return self.generation_s / self.step_s

    def by_stage(self) -> dict[str, float]:
        """Seconds by stage name, in the order of a step."""
        return {
            "data": self.data_s,
            "prepare": self.prepare_s,
            "generation": self.generation_s,
            "logprob": self.logprob_s,
            "train": self.train_s,
        }

    def with_generation(self, generation_s: float) -> Step:
        """The same step with another generation time."""
        return Step(
            data_s=self.data_s,
            prepare_s=self.prepare_s,
            generation_s=generation_s,
            logprob_s=self.logprob_s,
            train_s=self.train_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerEfficiency:
    """How near the learner comes to the dense peak, and what does not scale: from measured steps.

    `logprob` and `train` are fractions of the peak over all tokens, padding included.
    """

    data_s: float
    prepare_s: float
    logprob: float
    train: float


def learner_efficiency(
    measured: Step, *, model: ModelShape, hardware: Hardware, num_gpus: int, tokens: float, precision: Precision
) -> LearnerEfficiency:
    """The efficiency that a measured step implies for `tokens` tokens (with padding) on `num_gpus` GPUs."""
    ideal_s = _ideal_s(model, hardware, num_gpus=num_gpus, tokens=tokens, precision=precision)
    return LearnerEfficiency(
        data_s=measured.data_s,
        prepare_s=measured.prepare_s,
        logprob=_FORWARD_FLOPS * ideal_s / measured.logprob_s,
        train=_TRAIN_FLOPS * ideal_s / measured.train_s,
    )


def learner_stages(
    efficiency: LearnerEfficiency,
    *,
    model: ModelShape,
    hardware: Hardware,
    num_gpus: int,
    tokens: float,
    precision: Precision,
) -> Step:
    """A step without its generation: flops over peak and efficiency; data and prepare stay as measured."""
    ideal_s = _ideal_s(model, hardware, num_gpus=num_gpus, tokens=tokens, precision=precision)
    return Step(
        data_s=efficiency.data_s,
        prepare_s=efficiency.prepare_s,
        generation_s=0.0,
        logprob_s=_FORWARD_FLOPS * ideal_s / efficiency.logprob,
        train_s=_TRAIN_FLOPS * ideal_s / efficiency.train,
    )


def exposed_generation_s(generation_s: float, hidden_s: float) -> float:
    """What a step waits for generation that runs beside `hidden_s` seconds of other work."""
    return max(0.0, generation_s - hidden_s)


def amdahl(share: float, speedup: float) -> float:
    """Speedup of the whole when a part of `share` becomes `speedup` times as fast.

    Source: Amdahl, AFIPS 30 (1967) 483.
    """
    require(0.0 <= share <= 1.0, "share", "must lie in [0, 1]", share)
    require(speedup > 0, "speedup", "must be > 0", speedup)
    return 1.0 / (share / speedup + 1.0 - share)


def _ideal_s(model: ModelShape, hardware: Hardware, *, num_gpus: int, tokens: float, precision: Precision) -> float:
    """Seconds of one flop a parameter and token at the peak."""
    return model.parameters_per_token * tokens / (num_gpus * hardware.flops_per_s[precision])
