"""Synchronous GRPO: generate with the newest policy, learn from it once, repeat.

`run` is the whole algorithm. What it needs is behind three protocols; timing, checkpoints and records stand around
it, not in it. Scoring counts as stage `data`: it turns rollouts into training data on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from slipstream.data.prompts import PromptStream
from slipstream.grpo.config import GrpoConfig
from slipstream.grpo.loss import LossConfig
from slipstream.loop.acceptance_guard import AcceptanceGuard
from slipstream.loop.batch import Mismatch, assemble, mismatch
from slipstream.records import RefitCheck, StepRecord
from slipstream.rewards.verifier import RewardResult
from slipstream.rollout.config import SamplingConfig
from slipstream.rollout.engine import GenerationResult, RolloutEngine
from slipstream.types import STAGES, FinishReason, RolloutGroup, StageTimes, TrainBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.policy.stats import TrainStats


class Learner(Protocol):
    """The policy under training."""

    def logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]]:
        """Trainer logprobs of each sequence's response tokens."""
        ...

    def ref_logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]] | None:
        """The same under the reference policy, None without one."""
        ...

    def train_step(
        self,
        batch: TrainBatch,
        trainer_logprobs: list[NDArray[np.float32]],
        ref_logprobs: list[NDArray[np.float32]] | None,
        loss: LossConfig,
        temperature: float,
    ) -> TrainStats:
        """One update."""
        ...

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        """Write all that a resumed run needs."""
        ...

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restore it; returns its `extra`."""
        ...


class Refit(Protocol):
    """Brings the learner's weights into the engine."""

    def refit(self, version: int) -> RefitCheck:
        """See `slipstream.loop.refit_gate.RefitGate`."""
        ...


@dataclass(frozen=True, kw_only=True)
class SyncLoop:
    """Synchronous GRPO over `num_steps` steps; both arms run this same code."""

    engine: RolloutEngine
    learner: Learner
    gate: Refit
    prompts: PromptStream
    score: Callable[[Sequence[RolloutGroup]], RewardResult]
    config: GrpoConfig
    sampling: SamplingConfig
    on_step: Callable[[StepRecord], None]
    draft_version: int | None = None  # the engine's draft, None without one
    guard: AcceptanceGuard = field(default_factory=AcceptanceGuard)

    def run(self, start_step: int) -> None:
        """Train from `start_step` to the end; `on_step` gets each step's record before the next one starts."""
        for step in range(start_step, self.config.num_steps):
            clock = StageClock()
            with clock.stage("data"):
                prompts = self.prompts.batch(step)
            with clock.stage("prepare"):
                refit = self.gate.refit(step)
            with clock.stage("generation"):
                result = self.engine.generate(
                    prompts, sampling=self.sampling, group_size=self.config.group_size, seed=self._seed(step)
                )
            if result.acceptance is not None:
                self.guard.check(result.acceptance, policy_version=step)
            with clock.stage("data"):
                rewards = self.score(result.groups)
                batch = assemble(
                    result.groups,
                    rewards.rewards,
                    policy_version=step,
                    draft_version=self.draft_version,
                    scale_by_std=self.config.scale_advantages_by_std,
                )
            with clock.stage("logprob"):
                trainer_logprobs = self.learner.logprobs(batch, self.sampling.temperature)
                ref_logprobs = self.learner.ref_logprobs(batch, self.sampling.temperature)
            with clock.stage("train"):
                stats = self.learner.train_step(
                    batch, trainer_logprobs, ref_logprobs, self.config.loss, self.sampling.temperature
                )
            times = clock.times()
            gap = mismatch(batch.rollout_logprobs, trainer_logprobs, band=self.config.mismatch_band)
            self.on_step(_record(step, times, refit, result, rewards, gap, stats, draft_version=self.draft_version))

    def _seed(self, step: int) -> int:
        """Engine seed of a step: the same after a resume, different for each step of each recipe seed."""
        return int(np.random.SeedSequence([self.config.seed, step]).generate_state(1)[0])


@dataclass
class StageClock:
    """Wall time by stage; a stage may be entered more than once, stages never overlap."""

    _started_s: float = field(default_factory=time.perf_counter)
    _spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block's wall time to the stage `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[name] += time.perf_counter() - start

    def times(self) -> StageTimes:
        """What was spent so far, and the wall time since the clock was made, measured on its own."""
        spent = {f"{name}_s": seconds for name, seconds in self._spent_s.items()}
        return StageTimes(**spent, step_s=time.perf_counter() - self._started_s)


def _record(
    step: int,
    times: StageTimes,
    refit: RefitCheck,
    result: GenerationResult,
    rewards: RewardResult,
    gap: Mismatch,
    stats: TrainStats,
    *,
    draft_version: int | None,
) -> StepRecord:
    rollouts = [rollout for group in result.groups for rollout in group.rollouts]
    group_size = len(result.groups[0].rollouts)
    rewards_PG = np.asarray(rewards.rewards).reshape(-1, group_size)
    return StepRecord(
        step=step,
        times=times,
        reward_mean=float(rewards_PG.mean()),
        num_rollouts=len(rollouts),
        num_response_tokens=sum(len(rollout.token_ids) for rollout in rollouts),
        num_truncated=sum(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts),
        num_reward_timeouts=rewards.num_timeouts,
        num_reward_crashes=rewards.num_crashes,
        num_zero_signal_groups=int((rewards_PG == rewards_PG[:, :1]).all(axis=1).sum()),
        loss=stats.loss,
        grad_norm=stats.grad_norm,
        kl=stats.kl,
        clip_fraction=stats.clip_fraction,
        mismatch_kl=gap.k1,
        mismatch_k3=gap.k3,
        mismatch_mean=gap.mean,
        mismatch_max=gap.largest,
        mismatch_outside_fraction=gap.outside_fraction,
        acceptance=result.acceptance,
        policy_version=step,
        draft_version=draft_version,
        refit=refit,
    )
