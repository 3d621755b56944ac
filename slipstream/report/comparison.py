"""Comparison of executions by what MLflow holds of them: speedups, rewards, accuracy and cost side by side."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from slipstream.report.formats import KINDS, UNITS, estimate_of, render, with_interval
from slipstream.report.results import VERDICT_TAG
from slipstream.tracking.mlflow_store import Execution
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
    """Render the page of `slipstream compare` on executions of the tracking store `uri`."""
    return render(
        "comparison.html.jinja",
        executions=executions,
        answer=answer,
        cells=cells,
        headings=HEADINGS,
        differences=differences(executions),
        uri=uri,
    )


def cells(execution: Execution) -> list[str]:
    """Return the cells of an execution's row under `HEADINGS`."""
    started = datetime.fromtimestamp(execution.start_ms / 1000, tz=UTC)
    known = [execution.name, f"{started:%Y-%m-%d %H:%M}", execution.status.lower()]
    return [*known, *(_cell(execution, name) for name in _RESULTS.values())]


def answer(execution: Execution) -> str:
    """Return the verdict as the execution's report states it, or the status of one without a report."""
    return execution.tags.get(VERDICT_TAG) or f"{execution.status.lower()}, no verdict logged."


def differences(executions: Sequence[Execution]) -> dict[str, list[str]]:
    """Parameters and tags that differ between the executions; a missing value is `-`."""
    params = sorted({name for execution in executions for name in execution.params})
    columns = {name: [execution.params.get(name, NOTHING) for execution in executions] for name in params}
    columns |= {name: [execution.tags.get(name, NOTHING) for execution in executions] for name in _TELLING_TAGS}
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


def _cell(execution: Execution, name: str) -> str:
    """Format a result; ratios and differences include their intervals."""
    estimate = estimate_of(execution.metrics, name)
    if estimate is None:
        return NOTHING
    if name == "lossless":
        return "yes" if estimate.value == 1 else "NO"
    unit = KINDS[name].unit
    return with_interval(estimate, unit) if unit in ("x", "reward difference") else UNITS[unit].format(estimate.value)
