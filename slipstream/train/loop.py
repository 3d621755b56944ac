"""Synchronous GRPO: generate with the newest policy, learn from the rollouts, repeat; and the step of all loops.

`SyncLoop.run` is the whole algorithm. Protocols and the refit gate hide everything that it calls; timing, checkpoints
and records stand around it, not in it. Scoring counts as stage `data`: it turns rollouts into training data on the CPU.
`Draft` decides in which steps a draft learns beside the policy, from the same forward pass. `Trainer` goes from scored
rollouts to new weights, in the asynchronous loop too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.data.prompts import PromptStream
from slipstream.drafts.config import DraftConfig, DraftOnline
from slipstream.drafts.controller import Staleness
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engines, GenerationResult, joined
from slipstream.grpo.config import Correction, GrpoConfig
from slipstream.grpo.lags import lag_stats
from slipstream.grpo.update import Trained, Update, combined, minibatches
from slipstream.records.steps import DraftDecision, DynamicSampling, MachineUse, Overlap, RefitCheck, StepRecord
from slipstream.rewards.reward import RewardResult
from slipstream.rewards.reward import joined as joined_rewards
from slipstream.train.acceptance_guard import AcceptanceGuard
from slipstream.train.batch import Versions, assemble, chosen, have_signal, mismatch
from slipstream.train.metrics import StageClock
from slipstream.types import Arm, FinishReason, Prompt, RolloutGroup, StageTimes, TrainBatch


class Gate(Protocol):
    """Transfer of new weights into the engines."""

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        """Refit the engines to the learner's present weights, and to its draft if that changed, or raise."""
        ...


class Learner(Protocol):
    """Policy under training, with its checkpoints."""

    def logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]]:
        """Trainer logprobs of each sequence's response tokens."""
        ...

    def ref_logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]] | None:
        """Logprobs of the same tokens under the reference policy; None without one."""
        ...

    def train_step(self, update: Update) -> Trained:
        """Do one optimizer update, of the draft too if `update` says so; return logprobs that `update` lacks."""
        ...

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        """Write all that a resumed run needs, whole or not at all; one write may continue in the background."""
        ...

    def finish_checkpoint(self, *, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint that `save_checkpoint` began is written, or raise its error or a time-out."""
        ...

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restore a checkpoint; return its `extra`.

        Raises:
            FileNotFoundError: `path` holds no checkpoint.
            CheckpointError: the checkpoint is damaged.
        """
        ...

    def inspect_checkpoint(self, path: Path) -> dict[str, Any]:
        """Return the `extra` of a whole checkpoint; errors as in `load_checkpoint`."""
        ...


class Draft:
    """Draft of an arm from step to step; this class stays as it was pretrained, or stands for no draft."""

    def __init__(self, version: int | None = None) -> None:
        self.version = version  # of the draft that the next rollouts are sampled with; None without a draft

    def decide(self, result: GenerationResult, *, num_steps_left: int) -> DraftDecision | None:
        """Decide whether the step of these rollouts trains the draft; None: no step does. Call this once a step."""

    def note(self, record: StepRecord) -> None:
        """Update the draft's state after a step."""


class TrainedDraft(Draft):
    """Draft that learns beside the policy: version 0 is pretrained, and each step that trains it makes the next."""

    def __init__(self, config: DraftConfig, *, reference: float | None, history: Iterable[StepRecord] = ()) -> None:
        """Continue after the steps of `history`; `reference` is the mean acceptance length before RL, if measured."""
        super().__init__(version=0)
        self._online = config.online
        self._staleness = Staleness(reference=reference)
        for record in history:
            generation_s = 0.0 if record.draft_decision is None else record.draft_decision.generation_s
            self._staleness = self._staleness.observed(record.acceptance, generation_s)
            self.note(record)

    def decide(self, result: GenerationResult, *, num_steps_left: int) -> DraftDecision | None:
        """Decide by staleness, or always train."""
        self._staleness = self._staleness.observed(result.acceptance, result.generation_s)
        horizon_steps = min(self._online.horizon_steps, num_steps_left)
        decision = self._staleness.decide(generation_s=result.generation_s, horizon_steps=horizon_steps)
        is_always = self._online.when is DraftOnline.ALWAYS
        return replace(decision, trains=True, reason="always") if is_always else decision

    def note(self, record: StepRecord) -> None:
        """Count the step's training of the draft."""
        if record.draft_update is not None:
            self._staleness = self._staleness.trained(record.draft_update.elapsed_s)
            self.version = (self.version or 0) + 1


@dataclass(frozen=True, kw_only=True)
class SyncLoop:
    """Synchronous GRPO over `num_steps` steps; both arms run this code."""

    arm: Arm
    engine: Engines
    gate: Gate
    prompts: PromptStream
    score: Callable[[Sequence[RolloutGroup]], RewardResult]
    trainer: Trainer
    on_step: Callable[[StepRecord], None]
    start_clock: Callable[[], StageClock] = StageClock

    def run(self, start_step: int) -> None:
        """Train from `start_step` to the end; `on_step` receives each step's record before the next step starts."""
        trainer, config = self.trainer, self.trainer.config
        for step in range(start_step, config.num_steps):
            clock = self.start_clock()
            with clock.stage("data"):
                prompts = self.prompts.batch(step)
            with clock.stage("prepare"):
                refit = self.gate.refit(step, draft_version=trainer.draft.version)
            result, rewards = self._sampled(step, prompts, clock)
            learned = trainer.learn(step, result, rewards, clock=clock)
            self.on_step(trainer.record(step, clock.times(), refit, learned, machine=clock.machine_use()))

    def _sampled(
        self, step: int, prompts: Sequence[Prompt], clock: StageClock
    ) -> tuple[GenerationResult, RewardResult]:
        """Sample and score the step's prompts, and further ones while it lacks groups with signal and may go on.

        All prompts of a step differ, so that they can share its seed.
        """
        config, seed = self.trainer.config, engine_seed(self.trainer.config.seed, self.arm, step)
        results: list[GenerationResult] = []
        scores: list[RewardResult] = []
        num_with_signal = 0
        for number in range(1 + config.dynamic_sampling.max_extra_batches):
            if number > 0:
                with clock.stage("data"):
                    prompts = self.prompts.further(step, number)
            with clock.stage("generation"):
                found = self.engine.generate(
                    prompts, sampling=self.trainer.sampling, group_size=config.group_size, seed=seed
                )
                results.append(found)
            with clock.stage("data"):
                scores.append(self.score(results[-1].groups))
            num_with_signal += int(have_signal(scores[-1].rewards, len(prompts)).sum())
            if num_with_signal >= config.prompts_per_step:
                break
        return joined(results), joined_rewards(scores)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Outcome of a step's training, before the step's end is timed."""

    result: GenerationResult
    rewards: RewardResult
    groups: Sequence[RolloutGroup]  # those of `result` that were trained on
    batch: TrainBatch
    trained: Trained
    before: Sequence[NDArray[np.float32]]
    decision: DraftDecision | None


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Step from scored rollouts to new weights, and to the step's record."""

    learner: Learner
    config: GrpoConfig
    sampling: SamplingConfig  # of the rollouts
    draft: Draft = field(default_factory=Draft)
    guard: AcceptanceGuard = field(default_factory=AcceptanceGuard)
    max_lag: int = 0  # versions by which rollouts may be older than the policy that learns from them

    def learn(
        self,
        step: int,
        result: GenerationResult,
        rewards: RewardResult,
        *,
        clock: StageClock,
        published: Collection[Versions] | None = None,
    ) -> Learned:
        """Train version `step` of the policy on the rollouts, and the draft if `Draft.decide` says so.

        Raises:
            AcceptanceCollapse: the rollouts' acceptance fell far below its band.
        """
        if result.acceptance is not None and self.draft.version is not None:  # a memory that is lost is no fault
            self.guard.check(result.acceptance, policy_version=result.groups[0].rollouts[0].policy_version)
        with clock.stage("data"):
            groups, of_groups = chosen(result.groups, rewards.rewards, num_wanted=self.config.prompts_per_step)
            batch = assemble(
                groups,
                of_groups,
                config=self.config,
                policy_version=step,
                draft_version=self.draft.version,
                max_lag=self.max_lag,
                published=published,
            )
        decision = self.draft.decide(result, num_steps_left=self.config.num_steps - step - 1)
        before = reference = None
        if self.config.needs_logprob_pass:
            with clock.stage("logprob"):
                before = self.learner.logprobs(batch, self.sampling.temperature)
                reference = self.learner.ref_logprobs(batch, self.sampling.temperature)
        update = Update(
            batch=batch,
            trainer_logprobs=before,
            ref_logprobs=reference,
            loss=self.config.loss,
            temperature=self.sampling.temperature,
            max_response_tokens=self.sampling.max_response_tokens,
            trains_draft=decision is not None and decision.trains,
        )
        with clock.stage("train"):
            parts = minibatches(update, self.config.updates_per_step)
            trained = combined([self.learner.train_step(part) for part in parts])
        of_tokens = trained.own_logprobs if before is None else before
        assert of_tokens is not None, "the learner returns what it was not given"
        return Learned(
            result=result,
            rewards=rewards,
            groups=groups,
            batch=batch,
            trained=trained,
            before=of_tokens,
            decision=decision,
        )

    def record(
        self,
        step: int,
        times: StageTimes,
        refit: RefitCheck,
        learned: Learned,
        *,
        overlap: Overlap | None = None,
        machine: MachineUse | None = None,
    ) -> StepRecord:
        """Build the record of the step and pass it to the draft."""
        result, rewards, batch, loss = learned.result, learned.rewards, learned.batch, self.config.loss
        is_corrected = loss.corrects is not Correction.NONE or self.max_lag > 0
        rollouts = [rollout for group in result.groups for rollout in group.rollouts]
        lengths = [len(rollout.token_ids) for rollout in rollouts]
        rewards_PG = np.asarray(rewards.rewards).reshape(len(result.groups), -1)
        num_with_signal = int(have_signal(rewards.rewards, len(result.groups)).sum())
        lags = lag_stats(learned.groups, batch, learned.before, loss) if is_corrected else ()
        samples_on = self.config.dynamic_sampling.max_extra_batches > 0
        record = StepRecord(
            step=step,
            times=times,
            reward_mean=float(rewards_PG.mean()),
            num_rollouts=len(rollouts),
            num_response_tokens=sum(lengths),
            num_truncated=sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts),
            num_reward_timeouts=rewards.num_timeouts,
            num_reward_crashes=rewards.num_crashes,
            num_reward_failures=rewards.num_failures,
            reward_metrics=rewards.metrics,
            num_zero_signal_groups=len(result.groups) - num_with_signal,
            train=learned.trained.stats,
            mismatch=mismatch(batch.rollout_logprobs, learned.before),
            acceptance=result.acceptance,
            policy_version=rollouts[0].policy_version,
            draft_version=rollouts[0].draft_version,
            refit=refit,
            num_engine_restarts=result.num_engine_restarts,
            engine_idle_fraction=result.engine_idle_fraction,
            has_logprob_pass=self.config.needs_logprob_pass,
            draft_decision=learned.decision,
            draft_update=learned.trained.draft,
            autopilot=result.autopilot,
            overlap=overlap,
            lags=lags,
            longest_response_tokens=max(lengths),
            rewards_by_prompt=tuple(rewards_PG.mean(axis=1).tolist()),
            num_preemptions=result.num_preemptions,
            num_filtered=batch.counts.count(False),
            dynamic_sampling=_sampling(result, len(learned.groups), num_with_signal) if samples_on else None,
            machine=machine,
            ended_at_s=time.time(),
        )
        self.draft.note(record)
        return record


def _sampling(result: GenerationResult, num_trained: int, num_with_signal: int) -> DynamicSampling:
    """Count the groups that a step sampled, and those that it trained on."""
    return DynamicSampling(
        num_batches=result.num_calls,
        num_groups=len(result.groups),
        num_with_signal=num_with_signal,
        num_filled=max(0, num_trained - num_with_signal),
        num_surplus=max(0, num_with_signal - num_trained),
        extra_generation_s=result.extra_generation_s,
    )


def engine_seed(seed: int, arm: Arm, batch: int) -> int:
    """Engine seed of a batch: equal after a resume, different for each batch of each recipe seed and each arm.

    Arms that shared their seeds would share their first samples, so their results would not be independent.
    """
    return int(np.random.SeedSequence([seed, list(Arm).index(arm), batch]).generate_state(1)[0])


def recent(published: Collection[Versions], step: int, max_lag: int) -> tuple[Versions, ...]:
    """Published versions that rollouts of steps after `step` may come from."""
    return tuple(each for each in published if each[0] > step - max_lag)
