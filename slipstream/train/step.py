"""What a step does with scored rollouts: the part that the synchronous and the asynchronous loops share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slipstream.grpo.config import GrpoConfig
from slipstream.grpo.update import Trained, Update, combined, minibatches
from slipstream.train.metrics import StageClock
from slipstream.types import Arm, TrainBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Learner(Protocol):
    """The policy under training."""

    def logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]]:
        """Trainer logprobs of each sequence's response tokens."""
        ...

    def ref_logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]] | None:
        """The same under the reference policy, None without one."""
        ...

    def train_step(self, update: Update) -> Trained:
        """One optimizer update, of the draft too if `update` says so; with its own logprobs if `update` has none."""
        ...


def learn(
    learner: Learner,
    batch: TrainBatch,
    *,
    config: GrpoConfig,
    temperature: float,
    trains_draft: bool,
    clock: StageClock,
) -> tuple[Trained, Sequence[NDArray[np.float32]]]:
    """Train one step on `batch`: what it did, and the logprobs of the policy before its first update.

    Args:
        temperature: that the rollouts were sampled at.
        trains_draft: beside the policy, from the same forward pass.
    """
    update = Update(
        batch=batch,
        trainer_logprobs=None,
        ref_logprobs=None,
        loss=config.loss,
        temperature=temperature,
        trains_draft=trains_draft,
    )
    if config.needs_logprob_pass:
        with clock.stage("logprob"):
            update = replace(
                update,
                trainer_logprobs=learner.logprobs(batch, temperature),
                ref_logprobs=learner.ref_logprobs(batch, temperature),
            )
    with clock.stage("train"):
        parts = minibatches(update, config.updates_per_step)
        trained = combined([learner.train_step(part) for part in parts])
    before = trained.own_logprobs if update.trainer_logprobs is None else update.trainer_logprobs
    assert before is not None, "the learner returns what it was not given"
    return trained, before


def engine_seed(seed: int, arm: Arm, batch: int) -> int:
    """Engine seed of a batch: the same after a resume, different for each batch of each recipe seed and each arm.

    Arms that shared their seeds would share their first draws, and a luck of one would be the other's.
    """
    return int(np.random.SeedSequence([seed, list(Arm).index(arm), batch]).generate_state(1)[0])
