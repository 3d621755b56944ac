"""The records that travel between the parts of a GRPO step. Frozen, without torch, cheap to pickle.

Legend: `P` prompts a step, `G` rollouts per prompt (`group_size`), `B` = P * G rollouts, `T` tokens.
Rollouts keep their tokens as plain tuples: they cross process borders (Ray) and are turned into tensors
only by the learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

STAGES = ("data", "prepare", "generation", "logprob", "train")
"""The five timed stages of a GRPO step, in order; `prepare` is refit plus backend ready."""


class Workload(StrEnum):
    """What the policy is when RL starts."""

    RL_ZERO = "rl_zero"  # a base model
    RL_THINK = "rl_think"  # a model that already writes reasoning traces


class Arm(StrEnum):
    """The two arms of an ablation: same start, prompts and engine settings; only speculation differs.

    Each draws its rollouts with seeds of its own, so the arms are independent samples of the same training.
    """

    AUTOREGRESSIVE = "autoregressive"
    SPECULATIVE = "speculative"


class LoopMode(StrEnum):
    """How generation and training share a step."""

    SYNCHRONOUS = "synchronous"  # in turn: batch t comes from version t
    ONE_STEP_OFF = "one_step_off"  # batch t comes, whole, from version t - n, while earlier batches are trained on
    IN_FLIGHT = "in_flight"  # engines never stop: new weights enter between two of their iterations


class ArmLoop(StrEnum):
    """Which of an execution's two loops an arm is trained in."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"  # the recipe's own, which lets generation and training overlap


def arm_name(arm: Arm, loop: ArmLoop = ArmLoop.SYNCHRONOUS) -> str:
    """An arm of an execution, as its task, its policy and its results are called: no two share a name."""
    return arm.value if loop is ArmLoop.SYNCHRONOUS else f"{arm.value}_{loop.value}"


class Dtype(StrEnum):
    """Floating-point type of weights and activations; reductions and the optimizer stay in float32."""

    AUTO = "auto"  # whichever of the others the machine multiplies faster; settled before anything is built
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class FinishReason(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"  # the policy sampled its end-of-sequence token
    LENGTH = "length"  # it ran into `max_response_tokens`: truncated


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem, rendered with the policy's chat template and tokenized."""

    id: str  # content hash of `text`: equal problems have equal ids across data sets
    text: str
    token_ids: tuple[int, ...]
    answer: str
    data_source: str = ""  # what a reward function tells sets apart by
    extra: dict[str, Any] = field(
        default_factory=dict, hash=False
    )  # of the row, for a reward function; JSON can hold it


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Tokens of a rollout, one after another, that one version of policy and draft gave."""

    policy_version: int
    draft_version: int | None  # None: no draft took part
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled response.

    `token_ids` ends with the end-of-sequence token when `finish_reason` is STOP. `rollout_logprobs[i]` is the
    engine's log-probability of `token_ids[i]` under the policy at the sampling temperature (never the draft's).
    `policy_version` and `draft_version` are those of its first token; `versions` of all of them, empty where one pair
    gave all.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    draft_version: int | None  # None: no draft took part
    versions: tuple[VersionSpan, ...] = ()

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Which versions gave which of its tokens, in their order."""
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
    """One GRPO batch of `B` sequences, prompt and response joined; on its way to a learner rank its rows are arrays."""

    token_ids: Sequence[Sequence[int]]  # B sequences of prompt + response tokens
    prompt_lengths: Sequence[int]  # B
    rollout_logprobs: Sequence[Sequence[float]]  # B, one a response token
    advantages: Sequence[float]  # B
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Wall time of each stage of one step, and of the whole step measured on its own."""

    data_s: float
    prepare_s: float
    generation_s: float
    logprob_s: float
    train_s: float
    step_s: float

    @classmethod
    def in_sequence(
        cls, *, data_s: float, prepare_s: float, generation_s: float, logprob_s: float, train_s: float
    ) -> StageTimes:
        """A step whose stages run one after another with nothing between them."""
        return cls(
            data_s=data_s,
            prepare_s=prepare_s,
            generation_s=generation_s,
            logprob_s=logprob_s,
            train_s=train_s,
            step_s=data_s + prepare_s + logprob_s + train_s + generation_s,
        )

    @property
    def other_s(self) -> float:
        """All stages but generation."""
        return self.data_s + self.prepare_s + self.logprob_s + self.train_s

    def with_generation(self, generation_s: float) -> StageTimes:
        """The same stages one after another with another generation time."""
        return replace(self, generation_s=generation_s, step_s=self.other_s + generation_s)

    def by_stage(self) -> dict[str, float]:
        """Seconds by stage name, in the order of `STAGES`."""
        return {
            "data": self.data_s,
            "prepare": self.prepare_s,
            "generation": self.generation_s,
            "logprob": self.logprob_s,
            "train": self.train_s,
        }
