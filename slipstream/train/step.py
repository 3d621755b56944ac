"""What a step does with scored rollouts: the part that the synchronous and the asynchronous loops share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.config import Correction, GrpoConfig
from slipstream.grpo.lags import lag_stats
from slipstream.grpo.update import Trained, Update, combined, minibatches
from slipstream.records.steps import DraftDecision, Overlap, RefitCheck, StepRecord
from slipstream.rewards.verifier import RewardResult
from slipstream.train.acceptance_guard import AcceptanceGuard
from slipstream.train.batch import assemble, mismatch
from slipstream.train.draft import FixedDraft
from slipstream.train.metrics import StageClock, step_record
from slipstream.types import Arm, StageTimes, TrainBatch

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


class Draft(Protocol):
    """Who knows the draft's version, and when it is trained."""

    @property
    def version(self) -> int | None:
        """Of the draft that the next rollouts are drawn with; None without one."""
        ...

    def decide(self, result: GenerationResult, *, num_steps_left: int) -> DraftDecision | None:
        """Whether this step trains the draft; None: no step does."""
        ...

    def note(self, record: StepRecord) -> None:
        """Take note of what the step did."""
        ...


Versions = tuple[int, int | None]
"""Of the policy and of the draft that engines hold together."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A step that has trained, and whose end is not timed yet."""

    result: GenerationResult
    rewards: RewardResult
    batch: TrainBatch
    trained: Trained
    before: Sequence[NDArray[np.float32]]
    decision: DraftDecision | None


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """From scored rollouts to new weights, and to the step's record.

    Attributes:
        temperature: that the rollouts were sampled at.
        max_lag: by how many versions they may be older than the policy that learns from them.
    """

    learner: Learner
    config: GrpoConfig
    temperature: float
    draft: Draft = field(default_factory=FixedDraft)
    guard: AcceptanceGuard = field(default_factory=AcceptanceGuard)
    max_lag: int = 0

    def learn(
        self,
        step: int,
        result: GenerationResult,
        rewards: RewardResult,
        *,
        clock: StageClock,
        published: Collection[Versions] | None = None,
    ) -> Learned:
        """Train version `step` of the policy on the rollouts, and the draft if it is its turn.

        Args:
            published: see `assemble`.
        Raises:
            AcceptanceCollapse: of the rollouts.
        """
        if result.acceptance is not None:
            self.guard.check(result.acceptance, policy_version=result.groups[0].rollouts[0].policy_version)
        with clock.stage("data"):
            batch = assemble(
                result.groups,
                rewards.rewards,
                policy_version=step,
                draft_version=self.draft.version,
                scale_by_std=self.config.scale_advantages_by_std,
                max_lag=self.max_lag,
                published=published,
            )
        decision = self.draft.decide(result, num_steps_left=self.config.num_steps - step - 1)
        trained, before = learn(
            self.learner,
            batch,
            config=self.config,
            temperature=self.temperature,
            trains_draft=decision is not None and decision.trains,
            clock=clock,
        )
        return Learned(result=result, rewards=rewards, batch=batch, trained=trained, before=before, decision=decision)

    def record(
        self, step: int, times: StageTimes, refit: RefitCheck, learned: Learned, *, overlap: Overlap | None = None
    ) -> StepRecord:
        """What the step did; the draft takes note of it."""
        batch, before, loss = learned.batch, learned.before, self.config.loss
        is_corrected = loss.corrects is not Correction.NONE or self.max_lag > 0
        record = step_record(
            step,
            times,
            refit,
            result=learned.result,
            rewards=learned.rewards,
            trained=learned.trained,
            mismatch=mismatch(batch.rollout_logprobs, before, band=self.config.mismatch_band),
            has_logprob_pass=self.config.needs_logprob_pass,
        )
        record = replace(
            record,
            draft_decision=learned.decision,
            lags=lag_stats(learned.result.groups, batch, before, policy_version=step, loss=loss)
            if is_corrected
            else (),
            overlap=overlap,
        )
        self.draft.note(record)
        return record


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


def recent(published: Collection[Versions], step: int, max_lag: int) -> tuple[Versions, ...]:
    """Of versions that engines were given, those that rollouts of later steps than this may come from."""
    return tuple(each for each in published if each[0] > step - max_lag)
