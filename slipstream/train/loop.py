"""Synchronous GRPO: generate with the newest policy, learn from it, repeat.

`SyncLoop.run` is the whole algorithm. What it needs is behind protocols and the refit gate; timing, checkpoints and
records stand around it, not in it. Scoring counts as stage `data`: it turns rollouts into training data on the CPU. A
draft may learn beside the policy, from the same forward pass: `draft` says in which steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from slipstream.data.prompts import PromptStream
from slipstream.grpo.config import Correction, GrpoConfig
from slipstream.grpo.lags import lag_stats
from slipstream.records import DraftDecision, RefitCheck, StepRecord
from slipstream.rewards.verifier import RewardResult
from slipstream.rollout.config import SamplingConfig
from slipstream.rollout.engine import Engine, GenerationResult
from slipstream.train.acceptance_guard import AcceptanceGuard
from slipstream.train.batch import assemble, mismatch
from slipstream.train.draft import FixedDraft
from slipstream.train.metrics import StageClock, step_record
from slipstream.train.step import Learner, engine_seed, learn
from slipstream.types import Arm, RolloutGroup


class Gate(Protocol):
    """The way of new weights into the engine."""

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        """Bring the engine to the learner's present weights, and to its draft if that changed, or raise."""
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


@dataclass(frozen=True, kw_only=True)
class SyncLoop:
    """Synchronous GRPO over `num_steps` steps; both arms run this same code."""

    arm: Arm
    engine: Engine
    learner: Learner
    gate: Gate
    prompts: PromptStream
    score: Callable[[Sequence[RolloutGroup]], RewardResult]
    config: GrpoConfig
    sampling: SamplingConfig
    on_step: Callable[[StepRecord], None]
    draft: Draft = field(default_factory=FixedDraft)
    guard: AcceptanceGuard = field(default_factory=AcceptanceGuard)
    start_clock: Callable[[], StageClock] = StageClock

    def run(self, start_step: int) -> None:
        """Train from `start_step` to the end; `on_step` gets each step's record before the next one starts."""
        for step in range(start_step, self.config.num_steps):
            clock = self.start_clock()
            with clock.stage("data"):
                prompts = self.prompts.batch(step)
            with clock.stage("prepare"):
                refit = self.gate.refit(step, draft_version=self.draft.version)
            with clock.stage("generation"):
                result = self.engine.generate(
                    prompts,
                    sampling=self.sampling,
                    group_size=self.config.group_size,
                    seed=engine_seed(self.config.seed, self.arm, step),
                )
            if result.acceptance is not None:
                self.guard.check(result.acceptance, policy_version=step)
            with clock.stage("data"):
                rewards = self.score(result.groups)
                batch = assemble(
                    result.groups,
                    rewards.rewards,
                    policy_version=step,
                    draft_version=self.draft.version,
                    scale_by_std=self.config.scale_advantages_by_std,
                )
            decision = self.draft.decide(result, num_steps_left=self.config.num_steps - step - 1)
            trained, before = learn(
                self.learner,
                batch,
                config=self.config,
                temperature=self.sampling.temperature,
                trains_draft=decision is not None and decision.trains,
                clock=clock,
            )
            times = clock.times()
            gap = mismatch(batch.rollout_logprobs, before, band=self.config.mismatch_band)
            record = step_record(
                step,
                times,
                refit,
                result=result,
                rewards=rewards,
                trained=trained,
                mismatch=gap,
                has_logprob_pass=self.config.needs_logprob_pass,
            )
            if self.config.loss.corrects is not Correction.NONE:
                lags = lag_stats(result.groups, batch, before, policy_version=step, loss=self.config.loss)
                record = replace(record, lags=lags)
            record = replace(record, draft_decision=decision)
            self.draft.note(record)
            self.on_step(record)
