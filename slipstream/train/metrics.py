"""What is known of a step: its times by stage, its record, and its metrics under their MLflow names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from slipstream.engine.protocol import GenerationResult
from slipstream.grpo.update import Trained
from slipstream.records.steps import LagStats, Mismatch, Overlap, RefitCheck, StepRecord
from slipstream.rewards.verifier import RewardResult
from slipstream.types import STAGES, FinishReason, StageTimes


@dataclass
class StageClock:
    """Wall time by stage; a stage may be entered more than once, stages never overlap."""

    now_s: Callable[[], float] = time.perf_counter
    _spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def __post_init__(self) -> None:
        self._started_s = self.now_s()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block's wall time to the stage `name`."""
        start = self.now_s()
        try:
            yield
        finally:
            self._spent_s[name] += self.now_s() - start

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere to the stage `name`."""
        self._spent_s[name] += seconds

    def times(self) -> StageTimes:
        """What was spent so far, and the wall time since the clock was made, measured on its own."""
        spent = {f"{name}_s": seconds for name, seconds in self._spent_s.items()}
        return StageTimes(**spent, step_s=self.now_s() - self._started_s)


def step_record(
    step: int,
    times: StageTimes,
    refit: RefitCheck,
    *,
    result: GenerationResult,
    rewards: RewardResult,
    trained: Trained,
    mismatch: Mismatch,
    has_logprob_pass: bool,
) -> StepRecord:
    """The record of one step; its versions are those of the first rollout's first token."""
    rollouts = [rollout for group in result.groups for rollout in group.rollouts]
    rewards_PG = np.asarray(rewards.rewards).reshape(len(result.groups), -1)
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
        train=trained.stats,
        mismatch=mismatch,
        acceptance=result.acceptance,
        policy_version=rollouts[0].policy_version,
        draft_version=rollouts[0].draft_version,
        refit=refit,
        num_engine_restarts=result.num_engine_restarts,
        engine_idle_fraction=result.engine_idle_fraction,
        has_logprob_pass=has_logprob_pass,
        draft_update=trained.draft,
        autopilot=result.autopilot,
        longest_response_tokens=max(len(rollout.token_ids) for rollout in rollouts),
    )


def metrics_of(record: StepRecord) -> dict[str, float]:
    """A step's metrics under their MLflow names."""
    seconds = record.times.by_stage()
    metrics: dict[str, float] = {f"time/{stage}_s": seconds[stage] for stage in STAGES}
    metrics |= {
        "time/step_s": record.times.step_s,
        "rollout/response_tokens": record.num_response_tokens,
        "rollout/tokens_per_s": _tokens_per_s(record),
        "rollout/longest_response_tokens": record.longest_response_tokens,
        "rollout/truncated": record.num_truncated,
        "rollout/engine_restarts": record.num_engine_restarts,
        "rollout/engine_idle_fraction": record.engine_idle_fraction,
        "train/reward": record.reward_mean,
        "train/reward_timeouts": record.num_reward_timeouts,
        "train/reward_crashes": record.num_reward_crashes,
        "train/zero_signal_groups": record.num_zero_signal_groups,
        "train/loss": record.train.loss,
        "train/grad_norm": record.train.grad_norm,
        "train/kl": record.train.kl,
        "train/clip_fraction": record.train.clip_fraction,
        "train/learning_rate": record.train.learning_rate,
        "train/mismatch_kl": record.mismatch.k1,
        "train/mismatch_k3": record.mismatch.k3,
        "train/mismatch_mean": record.mismatch.mean,
        "train/mismatch_max": record.mismatch.largest,
        "train/mismatch_outside_fraction": record.mismatch.outside_fraction,
        "refit/num_checked_tensors": record.refit.num_tensors,
        "refit/check_s": record.refit.elapsed_s,
        "train/policy_version": record.policy_version,
    }
    if record.train.entropy is not None:
        metrics["train/entropy"] = record.train.entropy
    if record.refit.probe_difference is not None:
        metrics["refit/probe_difference"] = record.refit.probe_difference
    if record.autopilot is not None:
        metrics["spec/autopilot_speculates"] = float(record.autopilot.speculates)
        metrics["spec/autopilot_probes"] = float(record.autopilot.is_probe)
    if record.acceptance is not None:
        metrics["spec/mean_acceptance_length"] = record.acceptance.mean_acceptance_length
        metrics["spec/acceptance_rate"] = record.acceptance.acceptance_rate
        for position, rate in enumerate(record.acceptance.rate_by_position, start=1):
            metrics[f"spec/acceptance_rate_pos_{position}"] = rate
    return metrics | _draft_metrics(record) | _lag_metrics(record.lags) | _overlap_metrics(record.overlap)


def _tokens_per_s(record: StepRecord) -> float:
    """Of the engines while they worked, whether training waited for them or not."""
    generation_s = record.times.generation_s if record.overlap is None else record.overlap.generation_s
    return record.num_response_tokens / generation_s if generation_s > 0.0 else 0.0


def _overlap_metrics(overlap: Overlap | None) -> dict[str, float]:
    """Of a step beside which rollouts were generated."""
    if overlap is None:
        return {}
    return {
        "overlap/generation_s": overlap.generation_s,
        "overlap/hidden_generation_s": overlap.hidden_s,
        "overlap/engine_idle_fraction": overlap.engine_idle_fraction,
        "overlap/learner_idle_fraction": overlap.learner_idle_fraction,
        "overlap/score_s": overlap.score_s,
        "overlap/exposed_score_s": overlap.exposed_score_s,
        "overlap/publish_s": overlap.publish_s,
        "overlap/exposed_publish_s": overlap.exposed_publish_s,
        "overlap/awaited_rollouts": overlap.num_awaited,
        "overlap/restarted_rollouts": overlap.num_restarted,
        "overlap/regenerated_rollouts": overlap.num_regenerated,
    }


def _draft_metrics(record: StepRecord) -> dict[str, float]:
    """Of a draft that may be trained during RL: the decision, both sides of its inequality, and what the step did."""
    decision, update = record.draft_decision, record.draft_update
    if decision is None:
        return {}
    metrics = {
        "draft/trained": float(decision.trains),
        "draft/length": decision.length,
        "draft/reference_length": decision.reference_length,
        "draft/expected_saved_s": decision.saved_s,
        "draft/lost_s": decision.lost_s,
        "draft/train_s": 0.0 if update is None else update.elapsed_s,
    }
    if record.draft_version is not None:
        metrics["draft/version"] = record.draft_version
    if decision.cost_s is not None:
        metrics["draft/expected_cost_s"] = decision.cost_s
    if update is not None:
        metrics["draft/loss"] = update.loss
    return metrics


def _lag_metrics(lags: Sequence[LagStats]) -> dict[str, float]:
    """Of tokens that are corrected, or older than the policy: over all of them, and of each lag."""
    if not lags:
        return {}
    num_tokens = sum(each.num_tokens for each in lags)

    def mean(values: Iterable[float]) -> float:
        return sum(value * each.num_tokens for value, each in zip(values, lags, strict=True)) / num_tokens

    metrics = {
        "offpolicy/lag_mean": mean(each.lag for each in lags),
        "offpolicy/lag_max": max(each.lag for each in lags),
        "offpolicy/ratio_mean": mean(each.ratio_mean for each in lags),
        "offpolicy/ratio_max": max(each.ratio_max for each in lags),
        "offpolicy/clipped_fraction": mean(each.clipped_fraction for each in lags),
        "offpolicy/effective_sample_size": mean(each.effective_sample_size for each in lags),
    }
    for each in lags:
        metrics |= {
            f"offpolicy/tokens_fraction_lag_{each.lag}": each.num_tokens / num_tokens,
            f"offpolicy/ratio_mean_lag_{each.lag}": each.ratio_mean,
            f"offpolicy/ratio_max_lag_{each.lag}": each.ratio_max,
            f"offpolicy/clipped_fraction_lag_{each.lag}": each.clipped_fraction,
            f"offpolicy/effective_sample_size_lag_{each.lag}": each.effective_sample_size,
        }
    return metrics


def step_line(record: StepRecord, num_steps: int) -> str:
    """A step in words, for the log."""
    acceptance = "" if record.acceptance is None else f", AL {record.acceptance.mean_acceptance_length:.2f}"
    if record.autopilot is not None and not record.autopilot.speculates:
        acceptance = ", not drafted"
    draft = "" if record.draft_update is None else f", draft trained in {record.draft_update.elapsed_s:.2f} s"
    return (
        f"step {record.step + 1}/{num_steps}, reward {record.reward_mean:.3f}, {record.times.step_s:.2f} s "
        f"(generation {record.times.generation_s:.2f} s, {_tokens_per_s(record):.0f} tokens/s){acceptance}{draft}"
    )
