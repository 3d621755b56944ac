"""Synchronous GRPO: generate with the newest policy, learn from it, repeat.

`SyncLoop.run` is the whole algorithm. What it needs is behind protocols and the refit gate; timing, checkpoints and
records stand around it, not in it. Scoring counts as stage `data`: it turns rollouts into training data on the CPU. A
draft may learn beside the policy, from the same forward pass: `draft` says in which steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.data.prompts import PromptStream
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engine
from slipstream.grpo.config import GrpoConfig
from slipstream.records.steps import RefitCheck, StepRecord
from slipstream.rewards.verifier import RewardResult
from slipstream.train.acceptance_guard import AcceptanceGuard
from slipstream.train.draft import FixedDraft
from slipstream.train.metrics import StageClock
from slipstream.train.step import Draft, Learner, Trainer, engine_seed
from slipstream.types import Arm, RolloutGroup


class Gate(Protocol):
    """The way of new weights into the engine."""

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        """Bring the engine to the learner's present weights, and to its draft if that changed, or raise."""
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
        trainer = Trainer(
            learner=self.learner,
            config=self.config,
            temperature=self.sampling.temperature,
            draft=self.draft,
            guard=self.guard,
        )
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
            with clock.stage("data"):
                rewards = self.score(result.groups)
            learned = trainer.learn(step, result, rewards, clock=clock)
            self.on_step(trainer.record(step, clock.times(), refit, learned))
