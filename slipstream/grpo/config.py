"""Config of GRPO training."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.config import require
from slipstream.grpo.loss import LossConfig
from slipstream.policy.config import OptimizerConfig


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
