"""Page of an execution while it runs: an arm's time by stage, its reward and acceptance so far.

It is made from the spools of the execution's runs; no server is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from slipstream.report.formats import STAGE_LABELS, render, seconds
from slipstream.tracking.spool import read_events, spools_of
from slipstream.types import STAGES

_RECENT = 5  # steps of a mean
_MAX_VALUES = 16  # of a run without steps
_CURVES = (
    ("reward", "train/reward", "{:.3f}"),
    ("mean acceptance length", "spec/mean_acceptance_length", "{:.2f}"),
    ("acceptance rate", "spec/acceptance_rate", "{:.3f}"),
    ("generated tokens a second", "rollout/tokens_per_s", "{:.0f}"),
)

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows."""


def live_page(root: Path, execution: str, *, since_s: float, links: Mapping[str, str]) -> str:
    """Write the page as a piece of HTML.

    Args:
        since_s: time from which on a run must have logged something to be shown, in seconds since 1970.
        links: addresses by their text; an empty address is left out.
    """
    shown = {text: address for text, address in links.items() if address}
    runs = [_run(path) for _, path in spools_of(root, execution, since_s=since_s)]
    return render("live.html.jinja", execution=execution, links=shown, runs=runs)


def _run(path: Path) -> tuple[str, int, list[Table]]:
    """Title, number of timed steps and tables of a run; a later attempt's value of a step replaces an earlier one's."""
    name, status = path.stem, "runs"
    steps: dict[int, dict[str, float]] = {}
    for event in read_events(path):
        if event.header is not None:
            name, status = event.header.name, "runs"
        elif event.kind == "end":
            status = event.status
        elif event.kind == "metrics":
            steps.setdefault(event.step, {}).update(event.metrics)
    timed = [values for _, values in sorted(steps.items()) if "time/step_s" in values]
    return f"{name}: {status}", len(timed), _arm(timed) if timed else [_values(steps)]


def _arm(steps: Sequence[Mapping[str, float]]) -> list[Table]:
    step_s = median(values["time/step_s"] for values in steps)
    rows = [("step", f"{seconds(step_s)} s", "")]
    for stage in STAGES:
        stage_s = median(values.get(f"time/{stage}_s", 0.0) for values in steps)
        rows.append((STAGE_LABELS[stage], f"{seconds(stage_s)} s", f"{stage_s / step_s:.0%}" if step_s else ""))
    curves = []
    for label, name, form in _CURVES:
        values = [each[name] for each in steps if name in each]
        if values:
            curves.append((label, form.format(fmean(values[:_RECENT])), form.format(fmean(values[-_RECENT:]))))
    means = ("mean of", f"first {_RECENT} steps", f"last {_RECENT} steps")
    return [(("", "time", "of a step"), rows), (means, curves)]


def _values(steps: Mapping[int, Mapping[str, float]]) -> Table:
    last = {name: value for _, values in sorted(steps.items()) for name, value in values.items()}
    return ("", "last value"), [(name, f"{value:.4g}") for name, value in islice(last.items(), _MAX_VALUES)]
