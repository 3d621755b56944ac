"""Config of GRPO training: the loss, the optimizer, and the size of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from slipstream.config import (
    Checked,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Rule,
    ge,
    within,
)


class OptimizerMethod(StrEnum):
    """AdamW for every parameter, or Muon for the matrices of the layers and AdamW for the rest."""

    ADAMW = "adamw"
    MUON = "muon"


class RecomputeLogprobs(StrEnum):
    """Whether the learner computes its log-probabilities of the rollouts in a pass of their own, before it trains."""

    AUTO = "auto"  # only where the gradient depends on it
    ALWAYS = "always"


_BETAS = Rule("must be two numbers in [0, 1)", lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas))
_MASK_BAND = Rule("must be two ratios around 1", lambda band: len(band) == 2 and 0 <= band[0] < 1 < band[1])


class Level(StrEnum):
    """Of what a ratio of two policies is taken."""

    TOKEN = "token"
    SEQUENCE = "sequence"  # a whole response


class Correction(StrEnum):
    """How the loss weighs tokens that another policy sampled than the one that is trained."""

    TOKEN = "token"  # by each token's own ratio: little variance, and a bias that grows with the lag
    SEQUENCE = "sequence"  # by the product of the response's ratios: no bias but the cap's, and more variance
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class LossConfig(Checked, path="grpo.loss"):
    """Clipped policy loss with separate bounds (DAPO, arXiv:2503.14476) and an optional KL to a reference policy.

    `truncated_importance_sampling` caps the weight trainer probability / rollout probability that corrects for an
    engine whose numerics differ from the learner's, or whose policy is older; `correction` says of what the weight is
    the ratio. Where it says nothing, a cap means by token, and no cap none. Tokens whose ratio lies outside
    `mask_band`, or responses of which the geometric mean of the ratios does, are left out of the loss.
    """

    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.28
    kl_coefficient: NonNegativeFloat = 0.0
    correction: Correction | None = None
    truncated_importance_sampling: PositiveFloat | None = None
    mask_band: Annotated[tuple[float, ...] | None, _MASK_BAND] = None  # lowest and highest ratio that counts
    mask_level: Level = Level.TOKEN

    def _check(self) -> None:
        said, cap, band = self.correction, self.truncated_importance_sampling, self.mask_band
        self._require(
            said is None or (said is Correction.NONE) == (cap is None),
            "truncated_importance_sampling",
            f"must be {'null' if said is Correction.NONE else 'a number'} with grpo.loss.correction {said}",
            "drop it" if said is Correction.NONE else "it caps the weights: 2.0 is common",
        )
        if band is None:
            return
        self._require(
            self.corrects is not Correction.NONE,
            "mask_band",
            "must be null without a correction",
            "set grpo.loss.correction and its cap, grpo.loss.truncated_importance_sampling",
        )

    @property
    def corrects(self) -> Correction:
        """What `correction` says, or the cap where it says nothing."""
        if self.correction is not None:
            return self.correction
        return Correction.NONE if self.truncated_importance_sampling is None else Correction.TOKEN


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked, path="optimizer"):
    """The learning rate rises linearly over `warmup_steps` updates, then stays; `betas` are AdamW's."""

    learning_rate: Annotated[float, within("(0, 1]")]
    method: OptimizerMethod = OptimizerMethod.ADAMW
    betas: Annotated[tuple[float, ...], _BETAS] = (0.9, 0.95)
    weight_decay: Annotated[float, within("[0, 1]")] = 0.0
    clip_grad: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(Checked, path="grpo"):
    """How the policy learns from groups of rollouts; both arms of an ablation share it."""

    num_steps: Annotated[int, ge(1)]
    prompts_per_step: Annotated[int, ge(1)]
    group_size: Annotated[int, ge(2, "advantages are centred on the group's mean, and one rollout has no baseline")]
    optimizer: OptimizerConfig
    loss: LossConfig = field(default_factory=LossConfig)
    scale_advantages_by_std: bool = False
    updates_per_step: Annotated[int, ge(1)] = 1
    recompute_logprobs: RecomputeLogprobs = RecomputeLogprobs.AUTO
    checkpoint_every_steps: Annotated[int, ge(1)] = 10
    seed: int = 0

    def _check(self) -> None:
        self._require(
            self.updates_per_step <= self.prompts_per_step * self.group_size,
            "updates_per_step",
            f"must be at most the {self.prompts_per_step * self.group_size} rollouts of a step",
        )

    def is_checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step."""
        return (step + 1) % self.checkpoint_every_steps == 0

    @property
    def needs_logprob_pass(self) -> bool:
        """Whether the stage `logprob` runs.

        With one update a step the policy that trains is the one that the pass would ask: its own log-probabilities,
        detached, are the same bits, and the ratio of the loss is exactly 1. From a second update on the ratio is
        taken to the policy before the first, and a KL needs the reference's pass.
        """
        always = self.recompute_logprobs is RecomputeLogprobs.ALWAYS
        return always or self.updates_per_step > 1 or self.loss.kl_coefficient > 0.0
