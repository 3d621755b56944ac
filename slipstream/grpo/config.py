"""Config of GRPO training: the loss, the optimizer, and the size of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.config import require


class OptimizerMethod(StrEnum):
    """AdamW for every parameter, or Muon for the matrices of the layers and AdamW for the rest."""

    ADAMW = "adamw"
    MUON = "muon"


class RecomputeLogprobs(StrEnum):
    """Whether the learner computes its log-probabilities of the rollouts in a pass of their own, before it trains."""

    AUTO = "auto"  # only where the gradient depends on it
    ALWAYS = "always"


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
class LossConfig:
    """Clipped policy loss with separate bounds (DAPO, arXiv:2503.14476) and an optional KL to a reference policy.

    `truncated_importance_sampling` caps the weight trainer probability / rollout probability that corrects for an
    engine whose numerics differ from the learner's, or whose policy is older; `correction` says of what the weight is
    the ratio. Where it says nothing, a cap means by token, and no cap none. Tokens whose ratio lies outside
    `mask_band`, or responses of which the geometric mean of the ratios does, are left out of the loss.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.0
    correction: Correction | None = None
    truncated_importance_sampling: float | None = None
    mask_band: tuple[float, ...] | None = None  # lowest and highest ratio that counts
    mask_level: Level = Level.TOKEN

    def __post_init__(self) -> None:
        require(0.0 < self.clip_low < 1.0, "grpo.loss.clip_low", "must lie in (0, 1)", self.clip_low)
        require(self.clip_high > 0.0, "grpo.loss.clip_high", "must be > 0", self.clip_high)
        require(self.kl_coefficient >= 0.0, "grpo.loss.kl_coefficient", "must be >= 0", self.kl_coefficient)
        cap = self.truncated_importance_sampling
        require(cap is None or cap > 0.0, "grpo.loss.truncated_importance_sampling", "must be > 0 or null", cap)
        self._check_correction()

    def _check_correction(self) -> None:
        said, cap, band = self.correction, self.truncated_importance_sampling, self.mask_band
        require(
            said is None or (said is Correction.NONE) == (cap is None),
            "grpo.loss.truncated_importance_sampling",
            f"must be {'null' if said is Correction.NONE else 'a number'} with grpo.loss.correction {said}",
            cap,
            "drop it" if said is Correction.NONE else "it caps the weights: 2.0 is common",
        )
        if band is None:
            return
        rule = "must be two ratios around 1"
        require(len(band) == 2 and 0.0 <= band[0] < 1.0 < band[1], "grpo.loss.mask_band", rule, band)
        require(
            self.corrects is not Correction.NONE,
            "grpo.loss.mask_band",
            "must be null without a correction",
            band,
            "set grpo.loss.correction and its cap, grpo.loss.truncated_importance_sampling",
        )

    @property
    def corrects(self) -> Correction:
        """What `correction` says, or the cap where it says nothing."""
        if self.correction is not None:
            return self.correction
        return Correction.NONE if self.truncated_importance_sampling is None else Correction.TOKEN


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The learning rate rises linearly over `warmup_steps` updates, then stays; `betas` and `eps` are AdamW's."""

    learning_rate: float
    method: OptimizerMethod = OptimizerMethod.ADAMW
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require(0 < self.learning_rate <= 1, "optimizer.learning_rate", "must lie in (0, 1]", self.learning_rate)
        require(
            len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas),
            "optimizer.betas",
            "must be two numbers in [0, 1)",
            self.betas,
        )
        require(self.eps > 0, "optimizer.eps", "must be > 0", self.eps)
        require(0 <= self.weight_decay <= 1, "optimizer.weight_decay", "must lie in [0, 1]", self.weight_decay)
        require(self.clip_grad > 0, "optimizer.clip_grad", "must be > 0", self.clip_grad)
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", "must be >= 0", self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """How the policy learns from groups of rollouts; both arms of an ablation share it."""

    num_steps: int
    prompts_per_step: int
    group_size: int
    optimizer: OptimizerConfig
    loss: LossConfig = field(default_factory=LossConfig)
    scale_advantages_by_std: bool = False
    updates_per_step: int = 1
    recompute_logprobs: RecomputeLogprobs = RecomputeLogprobs.AUTO
    checkpoint_every_steps: int = 10
    mismatch_band: tuple[float, ...] = (0.5, 2.0)  # ratios of trainer to rollout probability that count as agreement
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            self.group_size >= 2,
            "grpo.group_size",
            "must be >= 2",
            self.group_size,
            "advantages are centred on the group's mean, and one rollout has no baseline",
        )
        band = self.mismatch_band
        require(len(band) == 2 and 0 < band[0] < 1 < band[1], "grpo.mismatch_band", "must be two ratios around 1", band)
        for name in ("num_steps", "prompts_per_step", "updates_per_step", "checkpoint_every_steps"):
            value: int = getattr(self, name)
            require(value >= 1, f"grpo.{name}", "must be >= 1", value)
        require(
            self.updates_per_step <= self.prompts_per_step * self.group_size,
            "grpo.updates_per_step",
            f"must be at most the {self.prompts_per_step * self.group_size} rollouts of a step",
            self.updates_per_step,
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
