"""What the learner tells its callers. Apart from it, so that reading it needs no Megatron import."""

from __future__ import annotations

from dataclasses import dataclass


class CheckpointError(ValueError):
    """A checkpoint cannot be resumed from: it is damaged, or of another run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStats:
    """What one update did. `kl` is to the reference policy, per token, 0 without one."""

    loss: float
    grad_norm: float  # before clipping
    kl: float
    clip_fraction: float
    num_tokens: int  # response tokens
    learning_rate: float
