"""Derived figures of a run, computed once for every page, JSON and terminal: synchronous and asynchronous arms.

Times exclude the warm-up steps of each arm, which pay for allocations and cold caches; counts, rewards, lags and
acceptance include all steps. Medians and spreads are over steps, and a ratio of arms is the typical ratio of a step.
Parts of an asynchronous step are means over the timed steps, so that they add up to the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress, groupby
from typing import Any, TypeVar

import numpy as np

from slipstream.engine.acceptance import combine
from slipstream.records.run import RunRecord
from slipstream.records.steps import (
    AcceptanceStats,
    ArmRecord,
    DraftDecision,
    DynamicSampling,
    EvaluationRecord,
    LagStats,
    Overlap,
    StepRecord,
)
from slipstream.report.claims import Claim, claim
from slipstream.statistics import (
    Estimate,
    Spread,
    amdahl,
    difference,
    grouped_ratio,
    ratio,
    reward_ci95,
    spread,
    sum_of_centres,
)
from slipstream.types import STAGES, Arm

_COUNTS = (
    "num_rollouts",
    "num_response_tokens",
    "num_truncated",
    "num_reward_timeouts",
    "num_zero_signal_groups",
    "num_preemptions",
    "num_filtered",
)
_LOST = ("num_awaited", "num_restarted", "num_regenerated")
_SWEEP_FIELDS = ("k", "batch", "generation_s", "mean_acceptance_length", "speedup")
_ACCURACY_FIELDS = ("avg_at_k", "k", "ci95", "truncated_fraction")
_ON_POLICY = LagStats(  # tokens of the trained version, which need no correction
    lag=0, num_tokens=0, ratio_mean=1.0, ratio_max=1.0, clipped_fraction=0.0, effective_sample_size=1.0
)

T = TypeVar("T")
ArmPair = tuple[ArmRecord, ArmRecord]
"""A baseline, and the arm that is compared with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmSummary:
    """Figures of one synchronous arm; `stages` and `step` are spreads of seconds over the timed steps."""

    arm: Arm
    k: int
    num_steps: int
    stages: dict[str, Spread]
    left_out: tuple[str, ...]  # stages that the loop skipped in every step
    step: Spread
    rewards: tuple[float, ...]
    reward_first: Estimate  # mean reward of the first quarter of the steps
    reward_last: Estimate  # mean reward of the last quarter of the steps
    reward_gain: Estimate  # the last quarter minus the first
    counts: dict[str, int]  # sums over all steps, by the names of their fields
    sampling: DynamicSampling | None  # sums over the steps; None: they train on all that they sample
    generation_tokens_per_s: float
    engine_idle_fraction: float  # mean over the timed steps

    def share(self, stage: str) -> float:
        """Return the stage's median as a fraction of the median step."""
        return self.stages[stage].median / self.step.median


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Speculative against autoregressive arm: typical ratios of a step, above 1 where speculation is faster."""

    generation: Estimate
    step: Estimate  # with the training of the draft
    control: Estimate | None  # ratio of the work that speculation does not change; None where that took no time
    paired: bool  # True if the arms alternated step by step
    reward_difference: Estimate  # speculative minus autoregressive reward, over the last quarter of the common steps

    @property
    def claims(self) -> dict[str, Claim]:
        """Verdicts on step and generation, by name."""
        ratios = {"step": self.step, "generation": self.generation}
        return {name: claim(ratio, self.control, paired=self.paired) for name, ratio in ratios.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Measured):
    """Both arms of a run."""

    generation_per_token: Estimate  # per response token, as the policies' response lengths drift apart
    step_bound: float  # bound for free drafting and verifying: generation shrinks by the mean acceptance length


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """All figures of the synchronous arms; a figure is None where its arm or the draft is missing."""

    autoregressive: ArmSummary | None
    speculative: ArmSummary | None
    comparison: Comparison | None
    acceptance: AcceptanceStats | None

    @property
    def arms(self) -> tuple[ArmSummary, ...]:
        """The arms that ran, the baseline first."""
        return tuple(arm for arm in (self.autoregressive, self.speculative) if arm is not None)

    @property
    def alone(self) -> ArmSummary | None:
        """The only arm of the run; None for a run of both or of none."""
        return self.arms[0] if len(self.arms) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopArm:
    """Figures of one arm over its timed steps; fractions refer to the arm's time."""

    name: str
    arm: Arm
    loop: str
    max_off_policy_steps: int
    num_speculative_tokens: int  # 0 where nothing was drafted
    step: Spread
    over_baseline: Estimate | None  # baseline step / this step; None for the baseline itself, or without one
    over_synchronous: Estimate | None  # same arm's synchronous step / this step; None for a synchronous arm
    stages_s: dict[str, float]  # means; generation counts only the time that training waited for it
    step_s: float  # mean
    hidden_s: float  # mean time of generation while the learner worked
    engine_idle_fraction: float
    learner_idle_fraction: float
    exposed_joining_fraction: float | None  # training waited for scores and weights; None for a synchronous arm
    hidden_joining_fraction: float | None  # the rest of scoring and publishing, which overlapped training
    lags: tuple[LagStats, ...]  # over all steps; empty for a synchronous arm
    reward_first: Estimate  # as in `ArmSummary`
    reward_last: Estimate
    num_awaited: int
    num_restarted: int
    num_regenerated: int

    def as_json(self) -> dict[str, Any]:
        """Return the arm's entry of `report.json`."""
        return {
            **{name: value for name, value in asdict(self).items() if name not in ("name", "arm", "step")},
            "arm": self.arm.value,
            "step_wall_s": _seconds(self.step),
            "over_baseline": estimate_json(self.over_baseline),
            "over_synchronous": estimate_json(self.over_synchronous),
            "exposed_s": self.exposed_s,
            "mean_lag": self.mean_lag,
            "reward_first_quarter": self.reward_first.value,
            "reward_last_quarter": self.reward_last.value,
        }

    @property
    def is_synchronous(self) -> bool:
        """Return True if generation and training alternate."""
        return self.over_synchronous is None

    @property
    def exposed_s(self) -> float:
        """Mean seconds of a step that training waited for rollouts."""
        return self.stages_s["generation"]

    @property
    def reward_gain(self) -> float:
        """Mean reward of the last quarter of the steps minus that of the first."""
        return self.reward_last.value - self.reward_first.value

    @property
    def mean_lag(self) -> float:
        """Mean lag of the trained tokens in policy versions."""
        tokens = sum(lag.num_tokens for lag in self.lags)
        return sum(lag.lag * lag.num_tokens for lag in self.lags) / tokens if tokens else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopComparison:
    """Figures of all arms, synchronous ones first; there are none unless every asynchronous arm has a counterpart."""

    arms: tuple[LoopArm, ...]
    speculation: Estimate | None  # autoregressive / speculative asynchronous step; None with one such arm
    paired: bool  # True if the two arms of `speculation` alternated step by step

    @property
    def claim(self) -> Claim | None:
        """Verdict on `speculation`, which has no control."""
        found = self.speculation
        return None if found is None else claim(found, None, paired=self.paired, overlaps=True)

    @property
    def asynchronous(self) -> tuple[LoopArm, ...]:
        """Arms whose generation and training overlap."""
        return tuple(arm for arm in self.arms if not arm.is_synchronous)


def summarise_arms(records: Sequence[ArmRecord]) -> RunSummary:
    """Compute the figures of a run's synchronous arms."""
    arms = {arm.arm: arm for arm in records if arm.steps}
    base, spec = arms.get(Arm.AUTOREGRESSIVE), arms.get(Arm.SPECULATIVE)
    acceptance = pooled_acceptance(spec.steps) if spec is not None else None
    return RunSummary(
        autoregressive=summarise_arm(base) if base is not None else None,
        speculative=summarise_arm(spec) if spec is not None else None,
        comparison=_compare(base, spec) if base is not None and spec is not None else None,
        acceptance=acceptance,
    )


def summarise_arm(arm: ArmRecord) -> ArmSummary:
    """Compute the figures of one arm."""
    steps, (first, last) = arm.timed_steps, quarters(arm.steps)
    generation_s = sum(step.times.generation_s for step in steps)  # 0 where training hides all generation
    return ArmSummary(
        arm=arm.arm,
        k=arm.num_speculative_tokens,
        num_steps=len(arm.steps),
        stages={stage: spread([step.times.by_stage()[stage] for step in steps]) for stage in STAGES},
        left_out=() if any(step.has_logprob_pass for step in steps) else ("logprob",),
        step=spread([step.times.step_s for step in steps]),
        rewards=tuple(step.reward_mean for step in arm.steps),
        reward_first=_reward(first),
        reward_last=_reward(last),
        reward_gain=_reward_gain(first, last),
        counts={name: sum(getattr(step, name) for step in arm.steps) for name in _COUNTS},
        sampling=_sampling(arm.steps),
        generation_tokens_per_s=sum(step.num_response_tokens for step in steps) / generation_s if generation_s else 0.0,
        engine_idle_fraction=float(np.mean([step.engine_idle_fraction for step in steps])),
    )


def _sampling(steps: Sequence[StepRecord]) -> DynamicSampling | None:
    found = [asdict(step.dynamic_sampling) for step in steps if step.dynamic_sampling is not None]
    return DynamicSampling(**{name: sum(each[name] for each in found) for name in found[0]}) if found else None


def _reward(steps: Sequence[StepRecord]) -> Estimate:
    """Mean reward of the steps; steps without a record of their prompts' rewards count as one prompt each."""
    return Estimate(value=float(np.mean([step.reward_mean for step in steps])), ci95=reward_ci95(_by_prompt(steps)))


def _reward_gain(first: Sequence[StepRecord], last: Sequence[StepRecord]) -> Estimate:
    """Mean reward of the last steps minus that of the first; Welch's interval over their prompts.

    Rewards that are all alike in both do not show their spread and give no interval.
    """
    before, after = np.array(_by_prompt(first)), np.array(_by_prompt(last))
    found = sum_of_centres((after, -before))
    return found if max(np.ptp(before), np.ptp(after)) > 1e-12 else replace(found, ci95=None)


def _by_prompt(steps: Sequence[StepRecord]) -> list[float]:
    return [reward for step in steps for reward in step.rewards_by_prompt or (step.reward_mean,)]


def pooled_acceptance(steps: Sequence[StepRecord]) -> AcceptanceStats | None:
    """Acceptance over all steps from their summed counters; None where nothing was drafted."""
    parts = [step.acceptance for step in steps if step.acceptance is not None]
    return combine(parts) if any(part.num_drafts for part in parts) else None


def acceptance_length(steps: Sequence[StepRecord]) -> float:
    """Mean acceptance length over all steps; 1 where nothing was drafted."""
    acceptance = pooled_acceptance(steps)
    return acceptance.mean_acceptance_length if acceptance else 1.0


def compare_loops(record: RunRecord) -> LoopComparison:
    """Compute the figures of all arms; of none without asynchronous arms, or without each one's synchronous arm.

    The baseline is the synchronous autoregressive arm, beside a speculative one.

    Raises:
        ValueError: an asynchronous step has no record of what overlapped.
    """
    synchronous = {arm.arm: arm for arm in record.arms if arm.steps}
    asynchronous = [arm for arm in record.asynchronous if arm.steps]
    base = synchronous.get(Arm.AUTOREGRESSIVE) if len(synchronous) == len(Arm) else None
    if not asynchronous or any(arm.arm not in synchronous for arm in asynchronous):
        return LoopComparison(arms=(), speculation=None, paired=False)
    arms = [_summarise_loop(arm, base, None) for arm in synchronous.values()]
    arms += [_summarise_loop(arm, base, synchronous[arm.arm]) for arm in asynchronous]
    both = sorted(asynchronous, key=lambda arm: arm.arm is Arm.SPECULATIVE)
    return LoopComparison(
        arms=tuple(arms),
        speculation=timed_ratio(both[0], both[1]) if len(both) == 2 else None,
        paired=len(both) == 2 and are_paired(both[0], both[1]),
    )


def pooled_lags(steps: Sequence[StepRecord]) -> tuple[LagStats, ...]:
    """Pool the trained tokens of all steps by lag, in ascending order; a step without lags counts as lag 0.

    Means are weighted by tokens, also the mean of the steps' effective sample sizes.
    """
    of_lag: dict[int, list[LagStats]] = {}
    for step in steps:
        for lag in step.lags or (replace(_ON_POLICY, num_tokens=step.num_response_tokens),):
            of_lag.setdefault(lag.lag, []).append(lag)
    return tuple(_pooled(lag, of_lag[lag]) for lag in sorted(of_lag))


def decided_steps(record: RunRecord) -> list[tuple[StepRecord, DraftDecision]]:
    """Return the speculative arm's steps that decided whether to train the draft, each with its decision."""
    steps = [step for arm in record.arms if arm.arm is Arm.SPECULATIVE for step in arm.steps]
    return [(step, step.draft_decision) for step in steps if step.draft_decision is not None]


def accuracy_curves(record: RunRecord) -> dict[str, dict[int, EvaluationRecord]]:
    """Evaluations of each arm before, during and after RL, by the number of updates of the evaluated policy.

    Asynchronous arms are evaluated before and after RL only.
    """
    known = {evaluation.policy: evaluation for evaluation in record.evaluations}
    curves: dict[str, dict[int, EvaluationRecord]] = {}
    for arm in (*record.arms, *record.asynchronous):
        found = {step.step: step.evaluation for step in arm.steps} | {0: known.get("start")}
        if arm.steps:
            found[arm.steps[-1].step + 1] = known.get(arm.name)
        curves[arm.name] = {step: each for step, each in sorted(found.items()) if each is not None}
    return curves


def accuracy_difference(record: RunRecord) -> tuple[int, Estimate] | None:
    """Last step with an evaluation of both arms, and the speculative minus the autoregressive avg@k there.

    The interval is paired by problem. None where no trained policies were evaluated on the same problems.
    """
    curves = accuracy_curves(record)
    base, spec = (curves.get(arm.value, {}) for arm in (Arm.AUTOREGRESSIVE, Arm.SPECULATIVE))
    common = [step for step in base.keys() & spec.keys() if base[step].prompt_hash == spec[step].prompt_hash]
    last = max(common, default=0)
    if last == 0:
        return None
    rates = ([correct / each[last].k for correct in each[last].correct_by_problem] for each in (base, spec))
    return last, difference(*rates)


def summarise(record: RunRecord) -> dict[str, Any]:
    """Return the run's part of `report.json`; figures that need a missing arm or interval are null."""
    run = summarise_arms(record.arms)
    comparison, acceptance = run.comparison, run.acceptance
    return {
        "recipe": record.recipe,
        "workload": record.workload,
        "arms": record.requested.value,
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
        "verdict": {name: each.as_json() for name, each in comparison.claims.items()} if comparison else {},
        "control": estimate_json(comparison.control if comparison else None),
        "paired": comparison.paired if comparison else None,
        "acceptance": {
            "k": run.speculative.k if run.speculative else 0,
            "mean_acceptance_length": acceptance.mean_acceptance_length if acceptance else 1.0,
            "rate_by_position": list(acceptance.rate_by_position) if acceptance else [],
        },
        "sweep": [_fields(point, *_SWEEP_FIELDS) for point in (record.tuning.points if record.tuning else ())],
        "reward": {arm.arm.value: list(arm.rewards) for arm in run.arms},
        "reward_first": {arm.arm.value: estimate_json(arm.reward_first) for arm in run.arms},
        "reward_last": {arm.arm.value: estimate_json(arm.reward_last) for arm in run.arms},
        "reward_gain": {arm.arm.value: estimate_json(arm.reward_gain) for arm in run.arms},
        "accuracy_by_step": {
            name: [{"step": step, **_fields(point, "avg_at_k", "ci95")} for step, point in curve.items()]
            for name, curve in accuracy_curves(record).items()
        },
        "validation": {scored.policy: _fields(scored, *_ACCURACY_FIELDS) for scored in record.evaluations},
    }


def quarters(values: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the first and the last quarter of `values`, each rounded down to at least one value."""
    number = max(1, len(values) // 4)
    return values[:number], values[-number:]


def estimate_json(estimate: Estimate | None) -> dict[str, Any]:
    """Return the estimate as JSON; missing parts are null."""
    return {"value": None, "ci95": None} if estimate is None else asdict(estimate)


def _compare(base: ArmRecord, spec: ArmRecord) -> Comparison:
    return Comparison(
        generation_per_token=timed_ratio(base, spec, lambda step: step.times.generation_s / step.num_response_tokens),
        step_bound=amdahl(summarise_arm(base).share("generation"), acceptance_length(spec.steps)),
        **measured([(base, spec)]),
    )


def measured(pairs: Sequence[ArmPair]) -> dict[str, Any]:
    """Compute the fields of `Measured` within each pair, pooled over the pairs."""
    has_control = all(_has_control(arm) for pair in pairs for arm in pair)
    return {
        "generation": grouped_ratio([timed_ratio(*pair, lambda step: step.times.generation_s) for pair in pairs]),
        "step": grouped_ratio([timed_ratio(*pair) for pair in pairs]),
        "control": grouped_ratio([_control(*pair) for pair in pairs]) if has_control else None,
        "paired": all(are_paired(*pair) for pair in pairs),
        "reward_difference": _reward_difference(pairs),
    }


def _reward_difference(pairs: Sequence[ArmPair]) -> Estimate:
    """Reward of each second arm minus the first's, over the last quarter of the steps that both made."""
    firsts: list[float] = []
    seconds: list[float] = []
    for pair in pairs:
        first, second = ({step.step: step.reward_mean for step in arm.steps} for arm in pair)
        _, common = quarters(sorted(first.keys() & second.keys()))
        firsts += [first[step] for step in common]
        seconds += [second[step] for step in common]
    return difference(firsts, seconds)


def are_paired(base: ArmRecord, other: ArmRecord) -> bool:
    """Return True if the arms alternated: the same timed steps, equally many a turn, and some turns side by side."""
    same = [step.step for step in base.timed_steps] == [step.step for step in other.timed_steps]
    return same and base.steps_a_turn == other.steps_a_turn > 0 and any(_turns(base, other))


def _turns(base: ArmRecord, other: ArmRecord) -> list[bool]:
    """For each timed step of alternating arms, True if no other turn lies between both arms' turns with it.

    An arm that was resumed from an older checkpoint than the other repeats the turns between on its own, later.
    """
    size = base.steps_a_turn
    ended = sorted((step.ended_at_s, step.step // size) for arm in (base, other) for step in arm.steps)
    times = Counter(turn for turn, _ in groupby(turn for _, turn in ended))
    return [times[step.step // size] == 1 for step in base.timed_steps]


def _control_s(step: StepRecord) -> float:
    """Seconds of a step that speculation does not change: log-probabilities, and training without the draft's."""
    draft_s = step.draft_update.elapsed_s if step.draft_update is not None else 0.0
    return step.times.logprob_s + step.times.train_s - draft_s


def _control(base: ArmRecord, spec: ArmRecord) -> Estimate:
    """Typical ratio of `_control_s` at equal numbers of computed tokens, where both arms recorded them and are paired.

    A pair's log ratio of seconds is assumed to follow that of its tokens by a factor between 0 and 1, which least
    squares over the pairs give (analysis of covariance), for an update has costs beside those of its tokens.
    """
    seconds = timed_values(base, spec, _control_s)
    counts = [step.train.num_computed_tokens for arm in (base, spec) for step in arm.timed_steps]
    if None in counts or not are_paired(base, spec):
        return ratio(*seconds, paired=are_paired(base, spec))
    tokens = timed_values(base, spec, lambda step: step.train.num_computed_tokens or 1)
    by_seconds, by_tokens = (np.log(np.divide(*values)) for values in (seconds, tokens))
    varied = by_tokens - by_tokens.mean()
    factor = float(np.clip(varied @ by_seconds / max(varied @ varied, 1e-12), 0.0, 1.0))
    return ratio(np.exp(by_seconds - factor * by_tokens).tolist(), [1.0] * len(by_seconds), paired=True)


def _has_control(arm: ArmRecord) -> bool:
    """Return True if every timed step has control time that nothing overlapped."""
    return all(_control_s(step) > 0 and step.overlap is None for step in arm.timed_steps)


def timed_values(
    base: ArmRecord, other: ArmRecord, value: Callable[[StepRecord], float]
) -> tuple[list[float], list[float]]:
    """Values of both arms' timed steps; of paired arms those of turns side by side, and the mean of each turn."""
    steps, size = [arm.timed_steps for arm in (base, other)], 1
    if are_paired(base, other):
        steps, size = [tuple(compress(each, _turns(base, other))) for each in steps], base.steps_a_turn
    first, second = (
        [float(np.mean([*map(value, turn)])) for _, turn in groupby(each, lambda step: step.step // size)]
        for each in steps
    )
    return first, second


def timed_ratio(
    base: ArmRecord, other: ArmRecord, value: Callable[[StepRecord], float] = lambda step: step.times.step_s
) -> Estimate:
    """Typical ratio of `base` to `other` in `value`, by default the time of the whole step."""
    return ratio(*timed_values(base, other, value), paired=are_paired(base, other))


def _seconds(times: Spread) -> dict[str, float]:
    return {f"{name}_s": value for name, value in asdict(times).items()}


def _fields(record: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _summarise_loop(arm: ArmRecord, base: ArmRecord | None, synchronous: ArmRecord | None) -> LoopArm:
    """Compute an arm's figures; `synchronous` is its synchronous counterpart, None for a synchronous arm itself."""
    steps, own = arm.timed_steps, summarise_arm(arm)
    total_s = sum(step.times.step_s for step in steps)
    all_overlaps = [] if synchronous is None else [_overlap(step) for step in arm.steps]
    overlaps = all_overlaps[-len(steps) :]
    exposed_s = sum(each.exposed_score_s + each.exposed_publish_s for each in overlaps)
    hidden = [(each.score_s - each.exposed_score_s, each.publish_s - each.exposed_publish_s) for each in overlaps]
    hidden_s = sum(max(0.0, part) for parts in hidden for part in parts)  # a wait can be longer than the work

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
        step=own.step,
        over_baseline=None if base is None or arm is base else timed_ratio(base, arm),
        over_synchronous=None if synchronous is None else timed_ratio(synchronous, arm),
        stages_s={stage: float(np.mean([step.times.by_stage()[stage] for step in steps])) for stage in STAGES},
        step_s=total_s / len(steps),
        hidden_s=float(np.mean([overlap.hidden_s for overlap in overlaps])) if overlaps else 0.0,
        engine_idle_fraction=engine,
        learner_idle_fraction=learner,
        exposed_joining_fraction=exposed_s / total_s if overlaps else None,
        hidden_joining_fraction=hidden_s / total_s if overlaps else None,
        lags=pooled_lags(arm.steps),
        reward_first=own.reward_first,
        reward_last=own.reward_last,
        **{name: sum(getattr(each, name) for each in all_overlaps) for name in _LOST},
    )


def _overlap(step: StepRecord) -> Overlap:
    if step.overlap is None:
        raise ValueError(f"step {step.step} of an asynchronous arm must say what overlapped, got none")
    return step.overlap


def _pooled(lag: int, parts: Sequence[LagStats]) -> LagStats:
    tokens = sum(part.num_tokens for part in parts)
    means = {
        name: sum(getattr(part, name) * part.num_tokens for part in parts) / tokens if tokens else 0.0
        for name in ("ratio_mean", "clipped_fraction", "effective_sample_size")
    }
    return LagStats(lag=lag, num_tokens=tokens, ratio_max=max(part.ratio_max for part in parts), **means)
