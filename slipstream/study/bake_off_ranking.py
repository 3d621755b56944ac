"""Drafters side by side: what each gains, what its training costs, and what was published of its kind.

Speedups are ratios to the autoregressive arm that took its steps in turn with the drafter, paired by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.records.steps import ArmRecord, StepRecord
from slipstream.report.formats import (
    difference_with_interval,
    interval,
    metrics_with_ends,
    speedup,
    speedup_with_interval,
)
from slipstream.report.reference import DraftReference, Reference
from slipstream.report.summary import last_quarter, pooled_acceptance
from slipstream.statistics import Estimate, bootstrap_difference, bootstrap_ratio
from slipstream.study.bake_off_records import BakeOffRecord, Entrant, Result
from slipstream.workers.placement.table import table

HEADINGS = (
    "drafter",
    "pretrained on",
    "trained in RL",
    "k",
    "acceptance length",
    "first to last quarter",
    "generation speedup",
    "step speedup",
    "verdict",
)
COST_HEADINGS = ("drafter", "pretraining", "repaid after", "training a step", "reward - AR")
PAPER_HEADINGS = ("acceptance length", "generation speedup")
METHOD_LABELS = {
    DraftMethod.EAGLE3: "EAGLE-3",
    DraftMethod.DRAFT_MODEL: "small model",
    DraftMethod.NGRAM: "n-gram",
    DraftMethod.SUFFIX: "suffix",
    DraftMethod.MTP: "MTP",
}
_INIT_LABELS = {
    DraftInit.IN_DOMAIN: "the task's prompts",
    DraftInit.GENERAL: "general prompts",
    DraftInit.FROM_HUB: "a given draft, the task's prompts",
}
_ONLINE_LABELS = {
    DraftOnline.OFF: "no",
    DraftOnline.ALWAYS: "every step",
    DraftOnline.WHEN_STALE: "when stale",
}
_PUBLISHED = {
    (DraftMethod.NGRAM, None, DraftOnline.OFF): "n-gram",
    (DraftMethod.EAGLE3, DraftInit.GENERAL, DraftOnline.OFF): "EAGLE-3, UltraChat + Magpie, offline",
    (DraftMethod.EAGLE3, DraftInit.GENERAL, DraftOnline.ALWAYS): "EAGLE-3, UltraChat + Magpie, online",
    (DraftMethod.EAGLE3, DraftInit.IN_DOMAIN, DraftOnline.OFF): "EAGLE-3, DAPO, offline",
    (DraftMethod.EAGLE3, DraftInit.IN_DOMAIN, DraftOnline.ALWAYS): "EAGLE-3, DAPO, online",
}
"""Which published draft is of a drafter's kind: general prompts were UltraChat and Magpie, the task's DAPO."""


def judge(entrant: Entrant, arm: ArmRecord, baseline: ArmRecord, *, pretraining_s: float) -> Result:
    """One drafter's arm beside the autoregressive one."""
    base, own = _common(baseline.timed_steps, arm.timed_steps)
    rewards = [last_quarter([step.reward_mean for step in steps]) for steps in _common(baseline.steps, arm.steps)]
    quarter = max(1, len(arm.steps) // 4)
    return Result(
        entrant=entrant,
        num_speculative_tokens=arm.num_speculative_tokens,
        num_steps=len(arm.steps),
        mean_acceptance_length=_acceptance_length(arm.steps),
        first_acceptance_length=_acceptance_length(arm.steps[:quarter]),
        last_acceptance_length=_acceptance_length(arm.steps[-quarter:]),
        generation=_ratio(base, own, lambda step: step.times.generation_s),
        step=_ratio(base, own, lambda step: step.times.step_s),
        pretraining_s=pretraining_s,
        training_s=float(np.mean([step.draft_update.elapsed_s if step.draft_update else 0.0 for step in own])),
        saved_s=float(np.median([s.times.step_s for s in base]) - np.median([s.times.step_s for s in own])),
        reward_difference=bootstrap_difference(rewards[0], rewards[1]),
        machine=arm.machine,
    )


def ranked(results: Sequence[Result]) -> tuple[Result, ...]:
    """The shortest step first."""
    return tuple(sorted(results, key=lambda result: (-result.step.value, result.entrant.name)))


def verdict(result: Result) -> str:
    """Whether the drafter makes a step faster."""
    if result.step.ci95 is None:
        return "one timed step, no interval"
    low, high = result.step.ci95
    if high < 1:
        return "LOSES to autoregressive"
    return "no gain beyond the noise" if low <= 1 else "faster"


def loses(result: Result) -> bool:
    """Whether the step is slower than without speculation, beyond the noise."""
    return result.step.ci95 is not None and result.step.ci95[1] < 1


def label(entrant: Entrant) -> str:
    """In a figure."""
    words = [METHOD_LABELS[entrant.method]]
    words += [] if entrant.init is None else [_INIT_LABELS[entrant.init]]
    words += [] if entrant.online is DraftOnline.OFF else [f"trained {_ONLINE_LABELS[entrant.online]}"]
    return ", ".join(words)


def cells(result: Result) -> list[str]:
    """One row under `HEADINGS`."""
    entrant = result.entrant
    return [
        METHOD_LABELS[entrant.method],
        "nothing" if entrant.init is None else _INIT_LABELS[entrant.init],
        _ONLINE_LABELS[entrant.online],
        str(result.num_speculative_tokens),
        f"{result.mean_acceptance_length:.2f}",
        f"{result.first_acceptance_length:.2f} to {result.last_acceptance_length:.2f}",
        speedup_with_interval(result.generation),
        speedup_with_interval(result.step),
        verdict(result),
    ]


def cost_cells(result: Result) -> list[str]:
    """One row under `COST_HEADINGS`."""
    return [
        label(result.entrant),
        f"{result.pretraining_s:.0f} s" if result.pretraining_s else "-",
        _repaid(result),
        f"{result.training_s:.2f} s" if result.training_s else "-",
        difference_with_interval(result.reward_difference),
    ]


def published(entrant: Entrant, workload: str, reference: Reference) -> DraftReference | None:
    """What was measured elsewhere of a drafter of this kind, on the workload of the same name."""
    name = _PUBLISHED.get((entrant.method, entrant.init, entrant.online))
    drafts = reference.workloads[workload].drafts
    return next((draft for draft in drafts if draft.draft == name), None)


def paper_cells(draft: DraftReference | None) -> list[str]:
    """One row under `PAPER_HEADINGS`."""
    if draft is None:
        return ["-", "-"]
    return [f"{draft.mean_acceptance_length:.2f}", speedup(draft.generation_speedup)]


def bake_off_table(record: BakeOffRecord, reference: Reference) -> str:
    """Plain text, three tables that each fit a terminal: speed, cost, and what was published; then who dropped out.

    `AL` is the acceptance length.
    """
    names = [label(result.entrant) for result in record.results]
    shown = [cells(result) for result in record.results]
    paper = [paper_cells(published(result.entrant, record.workload, reference)) for result in record.results]
    speeds = [
        ["drafter", "AL", *HEADINGS[6:]],
        *([name, row[4], *row[6:]] for name, row in zip(names, shown, strict=True)),
    ]
    costs = [[*COST_HEADINGS], *map(cost_cells, record.results)]
    headings = ["drafter", "AL, first to last", *(f"paper: {heading}" for heading in PAPER_HEADINGS)]
    beside = [headings, *([name, row[5], *more] for name, row, more in zip(names, shown, paper, strict=True))]
    parts = [table(rows) for rows in (speeds, costs, beside)] if names else []
    parts += [f"{dropout.entrant.name} DROPPED OUT: {dropout.reason}" for dropout in record.dropouts]
    return "\n\n".join(parts)


def answer(record: BakeOffRecord) -> str:
    """Which drafter won, by how much, and which are as good."""
    if not record.results:
        return "No drafter came to a result."
    first = record.results[0]
    if first.step.ci95 is not None and first.step.ci95[0] <= 1:
        return f"No drafter makes a step faster beyond the noise; the best is {label(first.entrant)}."
    low = first.step.ci95[0] if first.step.ci95 else first.step.value
    equal = [label(each.entrant) for each in record.results[1:] if each.step.ci95 and each.step.ci95[1] >= low]
    tie = f" Not told apart from it by these steps: {'; '.join(equal)}." if equal else ""
    return (
        f"{label(first.entrant)} has the shortest step: {speedup(first.step.value)} ({interval(first.step)}) the "
        f"autoregressive arm's speed, generation {speedup(first.generation.value)}.{tie}"
    )


def result_metrics(record: BakeOffRecord) -> dict[str, float]:
    """Every `result/…` metric of the bake-off's run."""
    metrics = {"num_drafters": float(len(record.results)), "num_dropouts": float(len(record.dropouts))}
    for result in record.results:
        name = result.entrant.name.replace("-", "_")
        metrics |= metrics_with_ends(f"step_speedup_{name}", result.step)
        metrics |= metrics_with_ends(f"generation_speedup_{name}", result.generation)
        metrics[f"mean_acceptance_length_{name}"] = result.mean_acceptance_length
    if record.results:
        metrics |= metrics_with_ends("step_speedup", record.results[0].step)
        metrics |= metrics_with_ends("generation_speedup", record.results[0].generation)
    return {f"result/{name}": value for name, value in metrics.items()}


def _common(*arms: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """The steps that all arms have, in order."""
    numbers = set.intersection(*({step.step for step in steps} for steps in arms))
    return [[step for step in steps if step.step in numbers] for steps in arms]


def _ratio(base: Sequence[StepRecord], own: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> Estimate:
    return bootstrap_ratio([value(step) for step in base], [value(step) for step in own], paired=True)


def _acceptance_length(steps: Sequence[StepRecord]) -> float:
    acceptance = pooled_acceptance(steps)
    return acceptance.mean_acceptance_length if acceptance else 1.0


def _repaid(result: Result) -> str:
    if not result.pretraining_s:
        return "-"
    return f"{result.pretraining_s / result.saved_s:.0f} steps" if result.saved_s > 0 else "never"
