"""Rank an ablation's variants by measured step time, each beside the autoregressive arm of its workload and seed.

Speedups are ratios within a seed, and only then taken over seeds: what a seed's prompts cost cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from slipstream.records.steps import ArmRecord, StepRecord
from slipstream.report.formats import (
    WORKLOAD_LABELS,
    difference_with_interval,
    interval,
    metrics_with_ends,
    speedup,
    speedup_with_interval,
)
from slipstream.report.summary import last_quarter, pooled_acceptance
from slipstream.statistics import Estimate, bootstrap_difference, bootstrap_grouped_ratio
from slipstream.study.ablation_records import TUNED, AblationRecord, Failure, Outcome, Row, Setting, Variant
from slipstream.types import Workload
from slipstream.workers.placement.table import table

Baselines = Mapping[tuple[Workload, int], ArmRecord]
"""The autoregressive arm of each workload and seed."""

HEADINGS = (
    "rank",
    "setting",
    "k",
    "seeds",
    "step speedup",
    "generation speedup",
    "step time / first",
    "reward - AR",
    "acceptance length",
    "verdict",
)
_AXES = ("init", "method", "loss")


def rank(
    execution: str,
    recipe: str,
    *,
    arms: Mapping[Variant, ArmRecord],
    baselines: Baselines,
    failures: Sequence[Failure],
) -> AblationRecord:
    """Every arm that has its baseline, in rows by setting; the others are failures.

    Args:
        failures: variants without an arm.
    """
    paired = {variant: arm for variant, arm in arms.items() if _key(variant) in baselines}
    lost = [Failure(variant=variant, reason="its baseline is missing") for variant in arms if variant not in paired]
    return AblationRecord(
        execution=execution,
        recipe=recipe,
        rows=tuple(_rows(paired, baselines)),
        outcomes=tuple(_outcome(variant, arm, baselines[_key(variant)]) for variant, arm in paired.items()),
        failures=(*failures, *lost),
    )


def verdict(row: Row) -> str:
    """Whether the setting is faster than no speculation, and whether another one is better than it."""
    if not any(row.lengths):
        return "speculation lost in tuning"
    if row.step.ci95 is None:
        return "one timed step, no interval"
    low, high = row.step.ci95
    if high < 1:
        return "LOSES to autoregressive"
    if low <= 1:
        return "no gain beyond the noise"
    if row.behind is None or row.behind.ci95 is None:
        return "faster"
    return "faster, as the first" if row.behind.ci95[0] <= 1 else "faster, behind the first"


def ranked_table(record: AblationRecord) -> str:
    """Plain text: the rows, then what failed and why."""
    parts = [table([list(HEADINGS), *[cells(record, row) for row in record.rows]])] if record.rows else []
    parts += [f"{failure.variant.name} FAILED: {failure.reason}" for failure in record.failures]
    return "\n\n".join([parts[0], "\n".join(parts[1:])] if len(parts) > 1 and record.rows else parts)


def cells(record: AblationRecord, row: Row) -> list[str]:
    """One row under `HEADINGS`."""
    num_seeds = len({outcome.variant.seed for outcome in record.outcomes} | {f.variant.seed for f in record.failures})
    finished = str(len(row.seeds)) if len(row.seeds) == num_seeds else f"{len(row.seeds)} of {num_seeds}"
    return [
        str(row.rank),
        label(record, row.setting),
        _lengths(row),
        finished,
        speedup_with_interval(row.step),
        speedup_with_interval(row.generation),
        "-" if row.behind is None else speedup_with_interval(row.behind),
        difference_with_interval(row.reward_difference),
        f"{row.mean_acceptance_length:.2f}",
        verdict(row),
    ]


def label(record: AblationRecord, setting: Setting) -> str:
    """What sets the setting apart from the others of the ablation; all of it, if nothing does."""
    settings = {outcome.variant.setting for outcome in record.outcomes} | {f.variant.setting for f in record.failures}
    words = []
    if len({other.workload for other in settings}) > 1:
        words.append(WORKLOAD_LABELS[setting.workload.value])
    words += [str(getattr(setting, axis)) for axis in _AXES if len({getattr(other, axis) for other in settings}) > 1]
    length = str(setting.num_speculative_tokens or TUNED)
    return ", ".join([*words, f"k {length}"]) if words or len(settings) > 1 else setting.name


def result_metrics(record: AblationRecord) -> dict[str, float]:
    """Every `result/…` metric of the ablation's run: the counts, and of each setting its speedups with their ends."""
    metrics = {"num_settings": float(len(record.rows)), "num_failed": float(len(record.failures))}
    for row in record.rows:
        name = row.setting.name.replace("-", "_")
        for kind, estimate in (("step", row.step), ("generation", row.generation)):
            metrics |= metrics_with_ends(f"{kind}_speedup_{name}", estimate)
        metrics[f"reward_difference_{name}"] = row.reward_difference.value
    if record.rows:
        best = max(record.rows, key=lambda row: row.step.value)
        metrics |= metrics_with_ends("step_speedup", best.step) | metrics_with_ends(
            "generation_speedup", best.generation
        )
    return {f"result/{name}": value for name, value in metrics.items()}


def outcome_metrics(outcome: Outcome) -> dict[str, float]:
    """Every `result/…` metric of a variant's run."""
    metrics = {
        "num_speculative_tokens": float(outcome.num_speculative_tokens),
        "mean_acceptance_length": outcome.mean_acceptance_length,
        **metrics_with_ends("generation_speedup", outcome.generation),
        **metrics_with_ends("step_speedup", outcome.step),
        **metrics_with_ends("reward_difference", outcome.reward_difference),
    }
    return {f"result/{name}": value for name, value in metrics.items()}


def unequal_machines(record: AblationRecord) -> list[str]:
    """Names of the variants that were timed on another machine than their baseline: their ratio says little."""
    return [
        outcome.variant.name
        for outcome in record.outcomes
        if outcome.machine and outcome.baseline_machine and outcome.machine != outcome.baseline_machine
    ]


def _key(variant: Variant) -> tuple[Workload, int]:
    return variant.setting.workload, variant.seed


def _rows(arms: Mapping[Variant, ArmRecord], baselines: Baselines) -> list[Row]:
    by_setting: dict[Setting, dict[int, ArmRecord]] = {}
    for variant, arm in arms.items():
        by_setting.setdefault(variant.setting, {})[variant.seed] = arm
    rows: list[Row] = []
    for workload in dict.fromkeys(setting.workload for setting in by_setting):
        own = {setting: seeds for setting, seeds in by_setting.items() if setting.workload is workload}
        base = {seed: arm for (of, seed), arm in baselines.items() if of is workload}
        unranked = [_row(setting, seeds, base) for setting, seeds in own.items()]
        ordered = sorted(unranked, key=lambda row: (-row.step.value, row.setting.name))
        first = own[ordered[0].setting]
        rows += [
            replace(row, rank=number, behind=_behind(own[row.setting], first) if number > 1 else None)
            for number, row in enumerate(ordered, start=1)
        ]
    return rows


def _row(setting: Setting, arms: Mapping[int, ArmRecord], baselines: Mapping[int, ArmRecord]) -> Row:
    seeds = tuple(sorted(arms))
    differences = [_reward_pairs(baselines[seed], arms[seed]) for seed in seeds]
    return Row(
        rank=0,
        setting=setting,
        seeds=seeds,
        lengths=tuple(arms[seed].num_speculative_tokens for seed in seeds),
        generation=_speedup([(baselines[seed], arms[seed]) for seed in seeds], _generation_s),
        step=_speedup([(baselines[seed], arms[seed]) for seed in seeds], _step_s),
        behind=None,
        reward_difference=bootstrap_difference(
            [reward for base, _ in differences for reward in base], [reward for _, own in differences for reward in own]
        ),
        mean_acceptance_length=float(np.mean([_acceptance_length(arms[seed]) for seed in seeds])),
    )


def _outcome(variant: Variant, arm: ArmRecord, baseline: ArmRecord) -> Outcome:
    base, own = _reward_pairs(baseline, arm)
    return Outcome(
        variant=variant,
        num_speculative_tokens=arm.num_speculative_tokens,
        num_steps=len(arm.steps),
        generation=_speedup([(baseline, arm)], _generation_s),
        step=_speedup([(baseline, arm)], _step_s),
        reward_difference=bootstrap_difference(base, own),
        mean_acceptance_length=_acceptance_length(arm),
        machine=arm.machine,
        baseline_machine=baseline.machine,
    )


def _behind(arms: Mapping[int, ArmRecord], first: Mapping[int, ArmRecord]) -> Estimate | None:
    """How many times as long as the first's a step takes, over the seeds that both finished."""
    seeds = sorted(arms.keys() & first.keys())
    return _speedup([(arms[seed], first[seed]) for seed in seeds], _step_s) if seeds else None


def _speedup(pairs: Sequence[tuple[ArmRecord, ArmRecord]], value: Callable[[StepRecord], float]) -> Estimate:
    return bootstrap_grouped_ratio(
        [([value(s) for s in base.timed_steps], [value(s) for s in own.timed_steps]) for base, own in pairs]
    )


def _generation_s(step: StepRecord) -> float:
    return step.times.generation_s


def _step_s(step: StepRecord) -> float:
    return step.times.step_s


def _reward_pairs(baseline: ArmRecord, arm: ArmRecord) -> tuple[list[float], list[float]]:
    """Rewards of the last quarter of the steps that both made."""
    base = {step.step: step.reward_mean for step in baseline.steps}
    own = {step.step: step.reward_mean for step in arm.steps}
    steps = last_quarter(sorted(base.keys() & own.keys()))
    return [base[step] for step in steps], [own[step] for step in steps]


def _acceptance_length(arm: ArmRecord) -> float:
    acceptance = pooled_acceptance(arm.steps)
    return acceptance.mean_acceptance_length if acceptance else 1.0


def _lengths(row: Row) -> str:
    """`7`, or `5, 7` where tuning chose differently from seed to seed."""
    return ", ".join(str(k) for k in sorted(set(row.lengths)))


def answer(record: AblationRecord) -> list[str]:
    """One sentence a workload: which setting is the fastest, by how much, and which are as good."""
    sentences = []
    for first in (row for row in record.rows if row.rank == 1):
        own = [row for row in record.rows if row.setting.workload is first.setting.workload]
        equal = [label(record, row.setting) for row in own[1:] if verdict(row) == "faster, as the first"]
        tie = f" Not told apart from it by these steps: {'; '.join(equal)}." if equal else ""
        sentences.append(
            f"{WORKLOAD_LABELS[first.setting.workload.value]}: {label(record, first.setting)} has the shortest step, "
            f"{speedup(first.step.value)} ({interval(first.step)}) the autoregressive arm's speed.{tie}"
        )
    return sentences
