"""The page of an ablation: one self-contained HTML file with the ranked table, its figure, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes

from slipstream.records.files import write_atomic, write_record
from slipstream.report.canvas import ARM_COLOURS, INK, LOSS, draw_svg
from slipstream.report.formats import WORKLOAD_LABELS
from slipstream.statistics import Estimate
from slipstream.study.ablation_ranking import HEADINGS, answer, cells, label, unequal_machines
from slipstream.study.ablation_records import AblationRecord, Row
from slipstream.types import Arm

_ROW_HEIGHT_IN = 0.34
_LOSER = "loses"  # class of the style sheet


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationPaths:
    """What `write_ablation` wrote; no figure where nothing was ranked."""

    html: Path
    json: Path
    figure: Path | None


def write_ablation(record: AblationRecord, directory: Path) -> AblationPaths:
    """Write `ablation.html`, `ablation.json` and `speedups.svg` into `directory`, each atomically."""
    figure = directory / "speedups.svg" if record.rows else None
    svg = speedups(record) if record.rows else ""
    if figure is not None:
        write_atomic(figure, svg.encode())
    html = directory / "ablation.html"
    write_atomic(html, render_ablation(record, svg).encode())
    return AblationPaths(html=html, json=write_record(record, directory / "ablation.json"), figure=figure)


def render_ablation(record: AblationRecord, svg: str) -> str:
    """The page around a figure that is drawn already."""
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    workloads = dict.fromkeys(row.setting.workload for row in record.rows)
    return environment.get_template("ablation.html.jinja").render(
        record=record,
        answers=answer(record),
        headings=HEADINGS,
        tables={
            WORKLOAD_LABELS[workload.value]: [
                {"kind": _LOSER if loses(row) else "", "cells": cells(record, row)}
                for row in record.rows
                if row.setting.workload is workload
            ]
            for workload in workloads
        },
        seeds=sorted({outcome.variant.seed for outcome in record.outcomes}),
        unequal=unequal_machines(record),
        machines=sorted({outcome.machine for outcome in record.outcomes if outcome.machine}),
        figure=Markup(svg),
        style=Markup((here.with_name("report") / "style.css").read_text()),
    )


def speedups(record: AblationRecord) -> str:
    """Step and generation speedup of every setting, ranked from the top: interval, value, and each seed's own value."""

    def draw(axes: Sequence[Axes]) -> None:
        for ax, kind in zip(axes, ("step", "generation"), strict=True):
            for place, row in enumerate(record.rows):
                _draw_row(ax, place, row.step if kind == "step" else row.generation, colour=_colour(row))
                own = [outcome for outcome in record.outcomes if outcome.variant.setting == row.setting]
                values = [(outcome.step if kind == "step" else outcome.generation).value for outcome in own]
                ax.plot(values, [place + 0.24] * len(values), "|", color=INK, markersize=5, alpha=0.7)
            ax.axvline(1, color=INK, linewidth=0.9, linestyle="--")
            ax.set(title=f"{kind.capitalize()} speedup over autoregressive", ylim=(len(record.rows) - 0.4, -0.6))
            ax.grid(visible=True, axis="x")
            ax.grid(visible=False, axis="y")
            ax.set_yticks(
                range(len(record.rows)), [_name(record, row) for row in record.rows] if kind == "step" else []
            )

    return draw_svg(2, 0.9 + _ROW_HEIGHT_IN * len(record.rows), draw)


def loses(row: Row) -> bool:
    """Whether the step is slower than without speculation, beyond the noise."""
    return row.step.ci95 is not None and row.step.ci95[1] < 1


def _draw_row(ax: Axes, place: int, estimate: Estimate, *, colour: str) -> None:
    low, high = estimate.ci95 or (estimate.value, estimate.value)
    errors = [[max(0.0, estimate.value - low)], [max(0.0, high - estimate.value)]]
    ax.errorbar([estimate.value], [place], xerr=errors, fmt="o", markersize=5, color=colour, capsize=3)


def _colour(row: Row) -> str:
    return LOSS if loses(row) else ARM_COLOURS[Arm.SPECULATIVE]


def _name(record: AblationRecord, row: Row) -> str:
    several = len({other.setting.workload for other in record.rows}) > 1
    return f"{'' if several else f'{row.rank}. '}{label(record, row.setting)}"
