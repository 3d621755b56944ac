"""Page of an execution while it runs: an arm's time by stage, its reward and acceptance so far.

It is made from the spools of the execution's runs; no server is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from slipstream.report.formats import STAGE_LABELS, seconds
from slipstream.tracking.spool import RunHeader, read_events, spools_of
from slipstream.types import STAGES

_RECENT = 5  # steps of a mean
_MAX_VALUES = 16  # of a run without steps
_CURVES = (
    ("reward", "train/reward", "{:.3f}"),
    ("mean acceptance length", "spec/mean_acceptance_length", "{:.2f}"),
    ("acceptance rate", "spec/acceptance_rate", "{:.3f}"),
    ("generated tokens a second", "rollout/tokens_per_s", "{:.0f}"),
)


def live_page(root: Path, execution: str, *, since_s: float, links: Mapping[str, str]) -> str:
    """Write the page as a piece of HTML.

    Args:
        since_s: time from which on a run must have logged something to be shown, in seconds since 1970.
        links: addresses by their text; an empty address is left out.
    """
    shown = [f'<a href="{escape(to)}">{escape(text)}</a>' for text, to in links.items() if to]
    parts = [f"<h2>{escape(execution)}, so far</h2>", f"<p>{' · '.join(shown)}</p>" if shown else ""]
    return "\n".join([*parts, *(_run(path) for _, path in spools_of(root, execution, since_s=since_s))])


def _run(path: Path) -> str:
    """Piece of the page for one run; a later attempt's value of a step takes the place of an earlier one's."""
    header: RunHeader | None = None
    status = "runs"
    steps: dict[int, dict[str, float]] = {}
    for event in read_events(path):
        if event.kind == "open":
            header, status = event.header, "runs"
        elif event.kind == "end":
            status = event.status
        elif event.kind == "metrics":
            steps.setdefault(event.step, {}).update(event.metrics)
    title = f"<h3>{escape(header.name if header is not None else path.stem)}: {escape(status)}</h3>"
    timed = [values for _, values in sorted(steps.items()) if "time/step_s" in values]
    return title + (_arm(timed) if timed else _values(steps))


def _arm(steps: Sequence[Mapping[str, float]]) -> str:
    step_s = median(values["time/step_s"] for values in steps)
    rows = [("step", f"{seconds(step_s)} s", "")]
    for stage in STAGES:
        stage_s = median(values.get(f"time/{stage}_s", 0.0) for values in steps)
        rows.append((STAGE_LABELS[stage], f"{seconds(stage_s)} s", f"{stage_s / step_s:.0%}" if step_s else ""))
    found = f"<p>{len(steps)} steps; medians over them:</p>" + _table(("", "time", "of a step"), rows)
    curves = []
    for label, name, form in _CURVES:
        values = [each[name] for each in steps if name in each]
        if values:
            curves.append((label, form.format(fmean(values[:_RECENT])), form.format(fmean(values[-_RECENT:]))))
    return found + _table(("mean of", f"first {_RECENT} steps", f"last {_RECENT} steps"), curves)


def _values(steps: Mapping[int, Mapping[str, float]]) -> str:
    last = {name: value for _, values in sorted(steps.items()) for name, value in values.items()}
    return _table(("", "last value"), [(name, f"{value:.4g}") for name, value in islice(last.items(), _MAX_VALUES)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table><tr>{''.join(f'<th>{escape(each)}</th>' for each in head)}</tr>{''.join(lines)}</table>"
