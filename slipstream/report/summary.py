"""The figures of a run, computed once for page, JSON and terminal.

Times leave out the first step of each arm where there are more: it pays for first allocations and cold caches.
Counts, rewards and acceptance take all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from slipstream.engine.acceptance import combine
from slipstream.records.run import RunRecord
from slipstream.records.stages import EvaluationRecord
from slipstream.records.steps import AcceptanceStats, ArmRecord, StepRecord
from slipstream.statistics import Estimate, Spread, amdahl, bootstrap_ratio, spread
from slipstream.types import STAGES, Arm

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmSummary:
    """One arm. `stages` are spreads of seconds by stage, `step` of the wall time of the whole step."""

    arm: Arm
    k: int
    num_steps: int
    stages: dict[str, Spread]
    left_out: tuple[str, ...]  # stages that no step had
    step: Spread
    rewards: tuple[float, ...]
    reward_first_quarter: float
    reward_last_quarter: float
    num_rollouts: int
    num_response_tokens: int
    num_truncated: int
    num_reward_timeouts: int
    num_zero_signal_groups: int
    generation_tokens_per_s: float
    engine_idle_fraction: float  # mean over the timed steps

    def share(self, stage: str) -> float:
        """Median of the stage as a fraction of the median step."""
        return self.stages[stage].median / self.step.median


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Speculative against autoregressive: ratios of medians over steps, above 1 where speculation is faster."""

    generation: Estimate
    step: Estimate
    generation_per_token: Estimate  # the arms' responses differ in length once their policies differ
    step_bound: float  # if drafting and verifying were free: generation shrinks by the whole acceptance length
    paired: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """All derived figures of a run; what a run lacks (an arm, a draft in it) is None."""

    autoregressive: ArmSummary | None
    speculative: ArmSummary | None
    comparison: Comparison | None
    acceptance: AcceptanceStats | None

    @property
    def arms(self) -> tuple[ArmSummary, ...]:
        """The arms that ran, the baseline first."""
        return tuple(arm for arm in (self.autoregressive, self.speculative) if arm is not None)


def summarise_run(record: RunRecord) -> RunSummary:
    """Compute every derived figure of `record`."""
    return summarise_arms(record.arms)


def summarise_arms(records: Sequence[ArmRecord]) -> RunSummary:
    """Compute what the arms alone say, for whoever has no whole run."""
    arms = {arm.arm: arm for arm in records if arm.steps}
    base, spec = arms.get(Arm.AUTOREGRESSIVE), arms.get(Arm.SPECULATIVE)
    acceptance = pooled_acceptance(spec.steps) if spec is not None else None
    both = base is not None and spec is not None
    return RunSummary(
        autoregressive=_summarise_arm(base) if base is not None else None,
        speculative=_summarise_arm(spec) if spec is not None else None,
        comparison=_compare(base, spec, acceptance) if both else None,
        acceptance=acceptance,
    )


def pooled_acceptance(steps: Sequence[StepRecord]) -> AcceptanceStats | None:
    """Acceptance over all steps together, from their summed counters; None when nothing was drafted."""
    parts = [step.acceptance for step in steps if step.acceptance is not None]
    return combine(parts) if any(part.num_drafts for part in parts) else None


def summarise(record: RunRecord) -> dict[str, Any]:
    """What `report.json` holds. Without two arms a speedup's value is null, without two timed steps its interval."""
    run = summarise_run(record)
    comparison, acceptance = run.comparison, run.acceptance
    return {
        "recipe": record.recipe,
        "workload": record.workload,
        "versions": dict(record.versions),
        "numerics": None if record.numerics is None else asdict(record.numerics),
        "logical_gpus": record.logical_gpus,
        "steps": min((arm.num_steps for arm in run.arms), default=0),
        "stages": {arm.arm.value: {stage: _seconds(arm.stages[stage]) for stage in STAGES} for arm in run.arms},
        "stages_left_out": {arm.arm.value: list(arm.left_out) for arm in run.arms},
        "step_wall_s": {arm.arm.value: _seconds(arm.step) for arm in run.arms},
        "speedup": {
            "generation": estimate_json(comparison.generation if comparison else None),
            "step": estimate_json(comparison.step if comparison else None),
        },
        "acceptance": {
            "k": run.speculative.k if run.speculative else 0,
            "mean_acceptance_length": acceptance.mean_acceptance_length if acceptance else 1.0,
            "rate_by_position": list(acceptance.rate_by_position) if acceptance else [],
        },
        "sweep": [
            {
                "k": point.k,
                "batch": point.batch,
                "generation_s": point.generation_s,
                "mean_acceptance_length": point.mean_acceptance_length,
                "speedup": point.speedup,
            }
            for point in record.tuning.points
        ],
        "reward": {arm.arm.value: list(arm.rewards) for arm in run.arms},
        "aime24": {evaluation.policy: _accuracy(evaluation) for evaluation in record.evaluations},
    }


def last_quarter(values: Sequence[T]) -> Sequence[T]:
    """The last quarter of `values`, rounded down, and at least one of them."""
    return values[-_quarter(values) :]


def estimate_json(estimate: Estimate | None) -> dict[str, Any]:
    """Its value and the ends of its interval; what there is not is null."""
    if estimate is None:
        return {"value": None, "ci95": None}
    return {"value": estimate.value, "ci95": list(estimate.ci95) if estimate.ci95 else None}


def _quarter(values: Sequence[Any]) -> int:
    return max(1, len(values) // 4)


def _summarise_arm(arm: ArmRecord) -> ArmSummary:
    steps = arm.timed_steps
    rewards = tuple(step.reward_mean for step in arm.steps)
    return ArmSummary(
        arm=arm.arm,
        k=arm.num_speculative_tokens,
        num_steps=len(arm.steps),
        stages={stage: spread([step.times.by_stage()[stage] for step in steps]) for stage in STAGES},
        left_out=() if any(step.has_logprob_pass for step in steps) else ("logprob",),
        step=spread([step.times.step_s for step in steps]),
        rewards=rewards,
        reward_first_quarter=float(np.mean(rewards[: _quarter(rewards)])),
        reward_last_quarter=float(np.mean(last_quarter(rewards))),
        num_rollouts=sum(step.num_rollouts for step in arm.steps),
        num_response_tokens=sum(step.num_response_tokens for step in arm.steps),
        num_truncated=sum(step.num_truncated for step in arm.steps),
        num_reward_timeouts=sum(step.num_reward_timeouts for step in arm.steps),
        num_zero_signal_groups=sum(step.num_zero_signal_groups for step in arm.steps),
        generation_tokens_per_s=sum(step.num_response_tokens for step in steps)
        / sum(step.times.generation_s for step in steps),
        engine_idle_fraction=float(np.mean([step.engine_idle_fraction for step in steps])),
    )


def _compare(base: ArmRecord | None, spec: ArmRecord | None, acceptance: AcceptanceStats | None) -> Comparison:
    assert base is not None and spec is not None
    base_steps, spec_steps = base.timed_steps, spec.timed_steps
    paired = [step.step for step in base_steps] == [step.step for step in spec_steps]

    def ratio(value: Callable[[StepRecord], float]) -> Estimate:
        return bootstrap_ratio([value(s) for s in base_steps], [value(s) for s in spec_steps], paired=paired)

    summary = _summarise_arm(base)
    return Comparison(
        generation=ratio(lambda step: step.times.generation_s),
        step=ratio(lambda step: step.times.step_s),
        generation_per_token=ratio(lambda step: step.times.generation_s / step.num_response_tokens),
        step_bound=amdahl(summary.share("generation"), acceptance.mean_acceptance_length if acceptance else 1.0),
        paired=paired,
    )


def _seconds(times: Spread) -> dict[str, float]:
    return {f"{name}_s": value for name, value in asdict(times).items()}


def _accuracy(evaluation: EvaluationRecord) -> dict[str, Any]:
    return {
        "avg_at_k": evaluation.avg_at_k,
        "k": evaluation.k,
        "ci95": list(evaluation.ci95),
        "truncated_fraction": evaluation.truncated_fraction,
    }
