"""Records that travel between the parts of a GRPO step: frozen, without torch, cheap to pickle.

Legend: `P` prompts a step, `G` rollouts per prompt (`group_size`), `B` = P * G rollouts, `T` tokens.
Rollouts keep their tokens as tuples, for they cross process boundaries (Ray); only the learner builds tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

STAGES = ("data", "prepare", "generation", "logprob", "train")
"""The five timed stages of a GRPO step, in order; `prepare` is refit and backend readiness."""


class Workload(StrEnum):
    """State of the policy when RL starts."""

    RL_ZERO = "rl_zero"  # a base model
    RL_THINK = "rl_think"  # a model that already writes reasoning traces


class Arm(StrEnum):
    """The two arms of a run: same start, prompts and engine settings; only speculation differs.

    Each arm samples rollouts with seeds of its own, so the arms are independent samples of the same training.
    """

    AUTOREGRESSIVE = "autoregressive"
    SPECULATIVE = "speculative"


class Arms(StrEnum):
    """The arms that a launch asks for."""

    SPECULATIVE = "speculative"
    AUTOREGRESSIVE = "autoregressive"
    BOTH = "both"

    @property
    def members(self) -> tuple[Arm, ...]:
        """The arms, the baseline first."""
        return tuple(Arm) if self is Arms.BOTH else (Arm(self.value),)


class LoopMode(StrEnum):
    """Order of generation and training in a step."""

    SYNCHRONOUS = "synchronous"  # in turn: version t generates batch t
    ONE_STEP_OFF = "one_step_off"  # version t - n generates the whole batch t while earlier batches are trained on
    IN_FLIGHT = "in_flight"  # engines never stop: new weights enter between two of their iterations


class ArmLoop(StrEnum):
    """The loop of an execution that trains an arm."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"  # the recipe's loop, in which generation and training overlap


def arm_name(arm: Arm, loop: ArmLoop = ArmLoop.SYNCHRONOUS) -> str:
    """Return the unique name of an execution's arm in tasks, policies and results."""
    return arm.value if loop is ArmLoop.SYNCHRONOUS else f"{arm.value}_{loop.value}"


class Quantization(StrEnum):
    """Type of the weights and inputs of an engine's matrices, where it is not the engine's own."""

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"  # e4m3


class Dtype(StrEnum):
    """Floating-point type of weights and activations; reductions and the optimizer stay in float32."""

    AUTO = "auto"  # the type that the machine multiplies faster, resolved before anything is built
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class FinishReason(StrEnum):
    """Reason why a rollout ended."""

    STOP = "stop"  # the policy sampled its end-of-sequence token
    LENGTH = "length"  # it reached `max_response_tokens`: truncated


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem, rendered with the policy's chat template and tokenized."""

    id: str  # content hash of `text`: equal problems have equal ids across data sets
    text: str
    token_ids: tuple[int, ...]
    answer: str
    data_source: str = ""  # what a reward function tells sets apart by
    extra: dict[str, Any] = field(default_factory=dict, hash=False)  # of the row, for a reward; JSON can hold it


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Consecutive tokens of a rollout that come from one version of policy and draft."""

    policy_version: int
    draft_version: int | None  # None: no draft took part
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled response.

    `token_ids` ends with the end-of-sequence token when `finish_reason` is STOP. `rollout_logprobs[i]` is the
    engine's log-probability of `token_ids[i]` under the policy at the sampling temperature (never the draft's).
    `policy_version` and `draft_version` are those of its first token; `versions` of all of them, empty where one pair
    gave all. `routes` are the experts [T - 1, layers, experts a token] that the engine's routers chose for each token
    of prompt and response but the last, which no engine computes; layers without experts have any numbers.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    draft_version: int | None  # None: no draft took part
    versions: tuple[VersionSpan, ...] = ()
    routes: Any = field(default=None, compare=False)  # an array of integers; None: the engine was not asked for them

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Versions of the rollout's tokens, in order."""
        whole = VersionSpan(
            policy_version=self.policy_version, draft_version=self.draft_version, num_tokens=len(self.token_ids)
        )
        return self.versions or (whole,)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """The `G` rollouts of one prompt: the unit over which advantages are centred."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """One GRPO batch of `B` sequences, prompt and response joined; a learner rank receives its rows as arrays."""

    token_ids: Sequence[Sequence[int]]  # B sequences of prompt + response tokens
    prompt_lengths: Sequence[int]  # B
    rollout_logprobs: Sequence[Sequence[float]]  # B, one a response token
    advantages: Sequence[float]  # B
    policy_version: int
    counts: Sequence[bool] = ()  # B, False for a sequence that the loss leaves out; empty: all count
    routes: Sequence[Any] = ()  # B arrays, as in `Rollout`; empty: the learner's own routers choose


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Wall time of each stage of one step, and of the whole step, measured independently."""

    data_s: float
    prepare_s: float
    generation_s: float
    logprob_s: float
    train_s: float
    step_s: float

    @classmethod
    def in_sequence(cls, *, generation_s: float, **others_s: float) -> StageTimes:
        """Return a step whose stages run one after another without gaps."""
        return cls(generation_s=0.0, step_s=0.0, **others_s).with_generation(generation_s)

    @property
    def other_s(self) -> float:
        """Time of all stages except generation."""
        return self.data_s + self.prepare_s + self.logprob_s + self.train_s

    def with_generation(self, generation_s: float) -> StageTimes:
        """Return the same sequential stages with another generation time."""
        return replace(self, generation_s=generation_s, step_s=self.other_s + generation_s)

    def by_stage(self) -> dict[str, float]:
        """Return the seconds by stage name, in the order of `STAGES`."""
        return {stage: getattr(self, f"{stage}_s") for stage in STAGES}
