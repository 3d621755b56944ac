"""The arms of an asynchronous loop beside the synchronous ones: what a step takes, hides and waits for, and learns.

Medians, spreads and ratios are of steps, as everywhere; parts of a step are means over the timed steps, so that they
add up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord, LagStats, Overlap, StepRecord
from slipstream.report.summary import last_quarter
from slipstream.statistics import Estimate, Spread, bootstrap_ratio, spread
from slipstream.types import STAGES, Arm


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopArm:
    """One arm in one loop. Fractions are of its time, over the timed steps."""

    name: str
    arm: Arm
    loop: str
    max_off_policy_steps: int
    num_speculative_tokens: int  # 0: nothing was drafted
    step: Spread
    over_baseline: Estimate | None  # the synchronous autoregressive arm's step over this one's; None: it is that arm
    over_synchronous: Estimate | None  # the same arm's synchronous step over this one's; None: it is synchronous
    stages_s: dict[str, float]  # means; of generation what training waited for
    step_s: float  # mean
    hidden_s: float  # generation while the learner was at work, mean
    engine_idle_fraction: float
    learner_idle_fraction: float
    exposed_joining_fraction: float | None  # training waited for scores and new weights; None: a synchronous arm
    hidden_joining_fraction: float | None  # the rest of what those took, which went on beside
    lags: tuple[LagStats, ...]  # over all steps; tokens of a synchronous arm have none
    reward_first_quarter: float
    reward_last_quarter: float
    num_awaited: int
    num_restarted: int
    num_regenerated: int

    @property
    def is_synchronous(self) -> bool:
        """Whether generation and training take turns."""
        return self.over_synchronous is None

    @property
    def exposed_s(self) -> float:
        """What training waited for rollouts, mean of a step."""
        return self.stages_s["generation"]

    @property
    def reward_gain(self) -> float:
        """Of the last quarter of the steps over the first."""
        return self.reward_last_quarter - self.reward_first_quarter

    @property
    def mean_lag(self) -> float:
        """Versions that the tokens were behind the policy that learned from them."""
        tokens = sum(lag.num_tokens for lag in self.lags)
        return sum(lag.lag * lag.num_tokens for lag in self.lags) / tokens if tokens else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopComparison:
    """The arms of both loops, the synchronous ones first."""

    arms: tuple[LoopArm, ...]
    speculation: Estimate | None  # asynchronous: the autoregressive step over the speculative one; None: an arm lacks

    @property
    def asynchronous(self) -> tuple[LoopArm, ...]:
        """The arms in which generation and training overlap."""
        return tuple(arm for arm in self.arms if not arm.is_synchronous)

    def synchronous(self, arm: Arm) -> LoopArm:
        """That arm in the synchronous loop."""
        return next(each for each in self.arms if each.arm is arm and each.is_synchronous)


def compare_loops(record: RunRecord) -> LoopComparison | None:
    """Every arm in every loop; None of a run without an asynchronous arm, or whose synchronous ones are not all there.

    Raises:
        ValueError: an asynchronous step has no record of what overlapped.
    """
    synchronous = {arm.arm: arm for arm in record.arms if arm.steps}
    asynchronous = [arm for arm in record.asynchronous if arm.steps]
    base = synchronous.get(Arm.AUTOREGRESSIVE)
    if base is None or not asynchronous or any(arm.arm not in synchronous for arm in asynchronous):
        return None
    arms = [_summarise(arm, base, None) for arm in synchronous.values()]
    arms += [_summarise(arm, base, synchronous[arm.arm]) for arm in asynchronous]
    by_arm = {arm.arm: arm for arm in asynchronous}
    return LoopComparison(
        arms=tuple(arms),
        speculation=_step_ratio(by_arm[Arm.AUTOREGRESSIVE], by_arm[Arm.SPECULATIVE]) if len(by_arm) == 2 else None,
    )


def pooled_lags(steps: Sequence[StepRecord]) -> tuple[LagStats, ...]:
    """The tokens of all steps together by lag, the youngest first; steps without a record of it lag by 0.

    Means are weighted by tokens. Effective sizes are of the weights of each step, and their mean is weighted alike.
    """
    of_lag: dict[int, list[LagStats]] = {}
    for step in steps:
        for lag in step.lags or (_on_policy(step.num_response_tokens),):
            of_lag.setdefault(lag.lag, []).append(lag)
    return tuple(_pooled(lag, of_lag[lag]) for lag in sorted(of_lag))


def _summarise(arm: ArmRecord, base: ArmRecord, synchronous: ArmRecord | None) -> LoopArm:
    """An arm; `synchronous` is None if it is a synchronous one itself."""
    steps = arm.timed_steps
    total_s = sum(step.times.step_s for step in steps)
    rewards = [step.reward_mean for step in arm.steps]
    last = last_quarter(rewards)
    overlaps = [] if synchronous is None else [_overlap(step) for step in steps]
    all_overlaps = [] if synchronous is None else [_overlap(step) for step in arm.steps]

    def share(value: Callable[[StepRecord], float]) -> float:
        return sum(value(step) for step in steps) / total_s

    if synchronous is None:
        engine = 1 - share(lambda step: step.times.generation_s * (1 - step.engine_idle_fraction))
        learner = 1 - share(lambda step: step.times.logprob_s + step.times.train_s)
    else:
        engine = share(lambda step: _overlap(step).engine_idle_fraction * step.times.step_s)
        learner = share(lambda step: _overlap(step).learner_idle_fraction * step.times.step_s)
    return LoopArm(
        name=arm.name,
        arm=arm.arm,
        loop=arm.loop,
        max_off_policy_steps=arm.max_off_policy_steps,
        num_speculative_tokens=arm.num_speculative_tokens,
        step=spread([step.times.step_s for step in steps]),
        over_baseline=None if arm is base else _step_ratio(base, arm),
        over_synchronous=None if synchronous is None else _step_ratio(synchronous, arm),
        stages_s={stage: float(np.mean([step.times.by_stage()[stage] for step in steps])) for stage in STAGES},
        step_s=total_s / len(steps),
        hidden_s=float(np.mean([overlap.hidden_s for overlap in overlaps])) if overlaps else 0.0,
        engine_idle_fraction=engine,
        learner_idle_fraction=learner,
        exposed_joining_fraction=sum(map(_exposed_joining_s, overlaps)) / total_s if overlaps else None,
        hidden_joining_fraction=sum(map(_hidden_joining_s, overlaps)) / total_s if overlaps else None,
        lags=pooled_lags(arm.steps),
        reward_first_quarter=float(np.mean(rewards[: len(last)])),
        reward_last_quarter=float(np.mean(last)),
        num_awaited=sum(each.num_awaited for each in all_overlaps),
        num_restarted=sum(each.num_restarted for each in all_overlaps),
        num_regenerated=sum(each.num_regenerated for each in all_overlaps),
    )


def _overlap(step: StepRecord) -> Overlap:
    if step.overlap is None:
        raise ValueError(f"step {step.step} of an asynchronous arm must say what overlapped, got none")
    return step.overlap


def _exposed_joining_s(overlap: Overlap) -> float:
    return overlap.exposed_score_s + overlap.exposed_publish_s


def _hidden_joining_s(overlap: Overlap) -> float:
    """Training may wait a moment longer than the work takes, for it is handed over."""
    hidden = (overlap.score_s - overlap.exposed_score_s, overlap.publish_s - overlap.exposed_publish_s)
    return sum(max(0.0, seconds) for seconds in hidden)


def _step_ratio(base: ArmRecord, other: ArmRecord) -> Estimate:
    """The median step of `base` over that of `other`."""
    base_steps, other_steps = base.timed_steps, other.timed_steps
    return bootstrap_ratio(
        [step.times.step_s for step in base_steps],
        [step.times.step_s for step in other_steps],
        paired=[step.step for step in base_steps] == [step.step for step in other_steps],
    )


def _on_policy(num_tokens: int) -> LagStats:
    """Tokens of the trained version, which are not corrected."""
    return LagStats(
        lag=0, num_tokens=num_tokens, ratio_mean=1.0, ratio_max=1.0, clipped_fraction=0.0, effective_sample_size=1.0
    )


def _pooled(lag: int, parts: Sequence[LagStats]) -> LagStats:
    tokens = sum(part.num_tokens for part in parts)

    def mean(value: Callable[[LagStats], float]) -> float:
        return sum(value(part) * part.num_tokens for part in parts) / tokens if tokens else 0.0

    return LagStats(
        lag=lag,
        num_tokens=tokens,
        ratio_mean=mean(lambda part: part.ratio_mean),
        ratio_max=max(part.ratio_max for part in parts),
        clipped_fraction=mean(lambda part: part.clipped_fraction),
        effective_sample_size=mean(lambda part: part.effective_sample_size),
    )
