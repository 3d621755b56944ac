"""Comparison of executions by what MLflow holds of them: speedups, rewards, accuracy and cost side by side."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from slipstream.report.claims import recorded, said
from slipstream.report.formats import KINDS, UNITS, estimate_of, interval, render, speedup, with_interval
from slipstream.tracking.mlflow_store import Execution
from slipstream.types import Arm
from slipstream.workers.placement.plan import table

NOTHING = "-"

_RESULTS = {
    "k": "num_speculative_tokens",
    "generation speedup": "generation_speedup",
    "step speedup": "step_speedup",
    "control": "control_ratio",
    "asynchronous step, AR": "asynchronous_step_speedup_autoregressive",
    "asynchronous step, spec": "asynchronous_step_speedup_speculative",
    "reward, AR": "reward_autoregressive",
    "reward, spec": "reward_speculative",
    "difference": "reward_difference",
    "accuracy, AR": "validation_autoregressive",
    "accuracy, spec": "validation_speculative",
    "acceptance length": "mean_acceptance_length",
    "lossless": "lossless",
    "hours": "hours",
    "GPU hours": "gpu_hours",
}
"""Metrics by short column heading: the labels of `KINDS` are too long for this table."""
HEADINGS = ("execution", "started", "status", *_RESULTS)
_MAX_COLUMNS = 6  # executions whose parameters fit side by side in a terminal; the page has no limit
_TELLING_TAGS = ("git.commit", "image", "node", "gpu")


def comparison_table(executions: Sequence[Execution]) -> str:
    """Render the executions as plain text: one row each, then differing parameters, then one sentence each."""
    parts = [table([list(HEADINGS), *[cells(execution) for execution in executions]])]
    differing = differences(executions)
    if len(executions) > _MAX_COLUMNS:
        parts.append(f"not the same in all: {', '.join(differing) or 'nothing'}")
    elif differing:
        names = [execution.name for execution in executions]
        parts.append(table([["not the same", *names], *[[name, *values] for name, values in differing.items()]]))
    parts.append("\n".join(f"{execution.name}: {answer(execution)}" for execution in executions))
    return "\n\n".join(parts)


def render_comparison(executions: Sequence[Execution], *, uri: str) -> str:
    """Render the page of `slipstream compare`.

    Args:
        uri: address of the tracking store that the executions were read from.
    """
    shown = [
        {"name": run.name, "answer": answer(run), "cells": cells(run), "url": _link(run.tags)} for run in executions
    ]
    return render(
        "comparison.html.jinja", executions=shown, headings=HEADINGS, differences=differences(executions), uri=uri
    )


def cells(execution: Execution) -> list[str]:
    """Return the cells of an execution's row under `HEADINGS`."""
    started = datetime.fromtimestamp(execution.start_ms / 1000, tz=UTC)
    known = [execution.name, f"{started:%Y-%m-%d %H:%M}", execution.status.lower()]
    return [*known, *(_cell(execution, name) for name in _RESULTS.values())]


def answer(execution: Execution) -> str:
    """State in one or two sentences which arm was faster, by how much, and how their rewards compare."""
    step, generation = (recorded(execution.metrics, f"{name}_speedup") for name in ("step", "generation"))
    alone = [arm for arm in Arm if f"result/reward_{arm}" in execution.metrics]
    if len(alone) == 1:
        reward, gain = (estimate_of(execution.metrics, f"{name}_{alone[0]}") for name in ("reward", "reward_gain"))
        learned = ", ".join(
            f"{word} {with_interval(each, unit)}"
            for word, each, unit in (("reward", reward, "reward"), ("gained", gain, "reward difference"))
            if each is not None
        )
        return f"the {alone[0]} arm alone, so no speedup; {learned}{_proof(execution)}{_asynchronous(execution)}."
    if generation is None or step is None:
        return {"RUNNING": "is running, no result yet."}.get(
            execution.status, f"{execution.status.lower()}, no result."
        )
    k = execution.metrics.get("result/num_speculative_tokens", 0.0)
    if k == 0:
        return f"speculation lost in tuning, so both arms ran without it{_asynchronous(execution)}."
    claims = said({"step": step, "generation": generation})
    return f"k = {k:.0f}. {claims} {_reward(execution)}{_proof(execution)}{_asynchronous(execution)}."


def differences(executions: Sequence[Execution]) -> dict[str, list[str]]:
    """Parameters and tags that differ between the executions; a missing value is `-`."""
    params = sorted({name for execution in executions for name in execution.params})
    columns = {name: [execution.params.get(name, NOTHING) for execution in executions] for name in params}
    columns |= {name: [execution.tags.get(name, NOTHING) for execution in executions] for name in _TELLING_TAGS}
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


def _link(tags: dict[str, str]) -> str:
    """Address of the execution in Flyte; empty where the tag is not a web address."""
    url = tags.get("flyte.execution_url", "")
    return url if url.startswith(("http://", "https://")) else ""


def _asynchronous(execution: Execution) -> str:
    """Speedup of each arm's asynchronous step over its synchronous step; empty without asynchronous arms."""
    found = {arm: estimate_of(execution.metrics, f"asynchronous_step_speedup_{arm.value}") for arm in Arm}
    ratios = [
        f"{arm.value} {speedup(each.value)} ({interval(each)})" for arm, each in found.items() if each is not None
    ]
    return f"; asynchronous step against the same arm in turn: {', '.join(ratios)}" if ratios else ""


def _reward(execution: Execution) -> str:
    difference = estimate_of(execution.metrics, "reward_difference")
    if difference is None:
        return "Rewards unknown"
    if difference.ci95 is None:
        return f"Reward {difference.value:+.3f}, no interval"
    low, high = difference.ci95
    same = "No difference of rewards seen" if low <= 0 <= high else "ANOTHER reward"
    return f"{same} ({difference.value:+.3f}, {low:+.3f} to {high:+.3f})"


def _proof(execution: Execution) -> str:
    lossless = execution.metrics.get("result/lossless")
    return "" if lossless is None else ", lossless" if lossless == 1 else ", NOT shown to be lossless"


def _cell(execution: Execution, name: str) -> str:
    """Format a result; a ratio includes its interval."""
    estimate = estimate_of(execution.metrics, name)
    if estimate is None:
        return NOTHING
    if name == "lossless":
        return "yes" if estimate.value == 1 else "NO"
    unit = KINDS[name].unit
    return with_interval(estimate) if unit == "x" else UNITS[unit].format(estimate.value)
