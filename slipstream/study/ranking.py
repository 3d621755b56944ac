"""Ranking of a study's variants by measured step time against an autoregressive arm.

Speedups are ratios within a seed, paired by step, and pooled over seeds afterwards: costs of a seed's prompts cancel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.records.steps import ArmRecord, num_warmup
from slipstream.report.claims import Claim, ClaimKind, claim
from slipstream.report.formats import metrics_with_ends
from slipstream.report.summary import Measured, acceptance_length, measured, quarters
from slipstream.statistics import Estimate
from slipstream.study.variants import Setting, Study, Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A variant's arm, and the autoregressive arm of its workload and seed (in a bake-off of its group)."""

    arm: ArmRecord
    baseline: ArmRecord
    pretraining_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafted(Measured):
    """Comparison of a variant, or of a setting over its seeds, with the autoregressive arm."""

    mean_acceptance_length: float  # bonus token included; mean over the seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Drafted):
    """Results of one variant against its autoregressive arm; intervals are over steps."""

    variant: Variant
    num_speculative_tokens: int  # 0 where speculation lost in tuning
    num_steps: int
    ends: tuple[float, float]  # mean acceptance length over the first and over the last quarter of the steps
    pretraining_s: float  # in a bake-off, with the policy's responses; 0 without pretraining
    training_s: float  # mean of a step's training of the draft; 0 without training
    saved_s: float  # median autoregressive step minus median own step; negative where time is lost
    machine: str  # empty where it was not recorded
    baseline_machine: str

    @property
    def is_unequal(self) -> bool:
        """Return True if variant and baseline were timed on different machines, so that their ratio says little."""
        return "" not in (self.machine, self.baseline_machine) and self.machine != self.baseline_machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A variant without a result."""

    variant: Variant
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(Drafted):
    """Results of one setting over its seeds; intervals are over seeds, or over steps with one seed."""

    rank: int  # from 1 within the workload
    setting: Setting
    outcomes: tuple[Outcome, ...]  # by seed
    behind: Estimate | None  # step time / that of the workload's first; None for the first, or without a common seed
    behind_control: Estimate | None = None  # the control of `behind`

    @property
    def lengths(self) -> tuple[int, ...]:
        """Draft length of each seed; tuned lengths may differ."""
        return tuple(outcome.num_speculative_tokens for outcome in self.outcomes)

    @property
    def claim(self) -> Claim:
        """Verdict on the step against the autoregressive one."""
        return self.claims["step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRecord:
    """A whole study; every variant of its grid is either in a row's outcomes or among the failures."""

    study: Study
    execution: str
    recipe: str
    rows: tuple[Row, ...]  # by workload, fastest step first
    failures: tuple[Failure, ...]
    dtype: str = ""  # type of learner and engines; empty where it was not recorded

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Outcomes of all variants with a result."""
        return tuple(outcome for row in self.rows for outcome in row.outcomes)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All variants, with those that failed."""
        return (*(o.variant for o in self.outcomes), *(failure.variant for failure in self.failures))


def rank(
    study: Study, ended: Mapping[Variant, Trained | str], *, execution: str, recipe: str, dtype: str = ""
) -> StudyRecord:
    """Rank the variants within their workload; `ended` has each one's arms, or the reason why it has none."""
    trained = {variant: arms for variant, arms in ended.items() if isinstance(arms, Trained)}
    warmup = num_warmup(arm for arms in trained.values() for arm in (arms.baseline, arms.arm))
    by_setting: dict[Setting, dict[int, Trained]] = {}
    for variant, arms in trained.items():
        timed = {name: replace(getattr(arms, name), num_warmup_steps=warmup) for name in ("arm", "baseline")}
        by_setting.setdefault(variant.setting, {})[variant.seed] = replace(arms, **timed)
    rows: list[Row] = []
    for workload in dict.fromkeys(setting.workload for setting in by_setting):
        own = [_row(*each) for each in by_setting.items() if each[0].workload is workload]
        own.sort(key=lambda row: (*_standing(row), row.setting.name))
        first = by_setting[own[0].setting]
        for number, row in enumerate(own, start=1):
            arms = by_setting[row.setting]
            common = [(arms[seed].arm, first[seed].arm) for seed in sorted(arms.keys() & first.keys())]
            # In a bake-off groups have different autoregressive arms, so steps of two groups do not compare directly.
            if number > 1 and common and study is Study.ABLATION:
                ahead = measured(common)
                row = replace(row, behind=ahead["step"], behind_control=ahead["control"])
            rows.append(replace(row, rank=number))
    failures = tuple(Failure(variant=each, reason=why) for each, why in ended.items() if isinstance(why, str))
    return StudyRecord(
        study=study, execution=execution, recipe=recipe, rows=tuple(rows), failures=failures, dtype=dtype
    )


def verdict(row: Row) -> str:
    """State if the setting beats no speculation, and if it is behind the workload's first setting."""
    if not any(row.lengths):
        return "speculation lost in tuning"
    kind = row.claim.kind
    if kind is not ClaimKind.FASTER or row.behind is None:
        return kind
    first = claim(row.behind, row.behind_control, paired=row.paired).kind
    if first is ClaimKind.NOT_MEASURED:
        return kind
    return f"{kind}, {'behind' if first is ClaimKind.FASTER else 'as'} the first"


def loses(row: Row) -> bool:
    """Return True if the step is slower than without speculation."""
    return row.claim.kind is ClaimKind.SLOWER


def equals_first(row: Row, first: Row) -> bool:
    """Return True if a measured setting cannot be told apart from the first of its workload."""
    if row.behind is not None:
        return verdict(row) == "faster, as the first"
    if row.claim.kind is ClaimKind.NOT_MEASURED or row.step.ci95 is None or first.step.ci95 is None:
        return False
    return row.step.ci95[1] >= first.step.ci95[0]


def result_metrics(record: StudyRecord) -> dict[str, float]:
    """Return the metrics of the study's run: counts, each setting's results, and those of the best setting."""
    counts = ("num_settings", "num_failed") if record.study is Study.ABLATION else ("num_drafters", "num_dropouts")
    metrics = {f"result/{counts[0]}": float(len(record.rows)), f"result/{counts[1]}": float(len(record.failures))}
    for row in record.rows:
        metrics |= _metrics(row, f"_{row.setting.name.replace('-', '_')}")
    return metrics | (_metrics(min(record.rows, key=_standing)) if record.rows else {})


def outcome_metrics(outcome: Outcome) -> dict[str, float]:
    """Return the metrics of a variant's run."""
    return {"result/num_speculative_tokens": float(outcome.num_speculative_tokens), **_metrics(outcome)}


def _metrics(found: Drafted, suffix: str = "") -> dict[str, float]:
    return {
        f"result/mean_acceptance_length{suffix}": found.mean_acceptance_length,
        **metrics_with_ends(f"result/generation_speedup{suffix}", found.generation),
        **metrics_with_ends(f"result/step_speedup{suffix}", found.step),
        **({} if found.control is None else metrics_with_ends(f"result/control_ratio{suffix}", found.control)),
        **metrics_with_ends(f"result/reward_difference{suffix}", found.reward_difference),
    }


def _standing(row: Row) -> tuple[bool, float]:
    """Sort key: measured rows first, then faster steps first."""
    return row.claim.kind is ClaimKind.NOT_MEASURED, -row.step.value


def _row(setting: Setting, trained: Mapping[int, Trained]) -> Row:
    seeds = sorted(trained)
    outcomes = tuple(_outcome(Variant(setting=setting, seed=seed), trained[seed]) for seed in seeds)
    estimates = _estimates([trained[seed] for seed in seeds])
    return Row(rank=0, setting=setting, outcomes=outcomes, behind=None, **estimates)


def _outcome(variant: Variant, trained: Trained) -> Outcome:
    arm, baseline = trained.arm, trained.baseline
    timed, (first, last) = arm.timed_steps, quarters(arm.steps)
    base_s, own_s = (float(np.median([step.times.step_s for step in each.timed_steps])) for each in (baseline, arm))
    return Outcome(
        variant=variant,
        num_speculative_tokens=arm.num_speculative_tokens,
        num_steps=len(arm.steps),
        ends=(acceptance_length(first), acceptance_length(last)),
        pretraining_s=trained.pretraining_s,
        training_s=float(np.mean([step.draft_update.elapsed_s if step.draft_update else 0.0 for step in timed])),
        saved_s=base_s - own_s,
        machine=arm.machine,
        baseline_machine=baseline.machine,
        **_estimates([trained]),
    )


def _estimates(trained: Sequence[Trained]) -> dict[str, Any]:
    """Compute the fields that a row and an outcome share, over one seed or several."""
    lengths = [acceptance_length(each.arm.steps) for each in trained]
    pairs = [(each.baseline, each.arm) for each in trained]
    return {**measured(pairs), "mean_acceptance_length": float(np.mean(lengths))}
