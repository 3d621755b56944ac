"""The page of a bake-off: one self-contained HTML file with the table, its figure, and who dropped out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes

from slipstream.records.files import write_atomic, write_record
from slipstream.report.canvas import ARM_COLOURS, INK, LOSS, draw_svg
from slipstream.report.formats import WORKLOAD_LABELS
from slipstream.report.reference import read_reference
from slipstream.statistics import Estimate
from slipstream.study.bake_off_ranking import (
    COST_HEADINGS,
    HEADINGS,
    PAPER_HEADINGS,
    answer,
    cells,
    cost_cells,
    label,
    loses,
    paper_cells,
    published,
)
from slipstream.study.bake_off_records import BakeOffRecord
from slipstream.types import Arm

_ROW_HEIGHT_IN = 0.34


def write_bake_off(record: BakeOffRecord, directory: Path) -> list[Path]:
    """Write `bake_off.html`, `bake_off.json` and, if there is a result, `speedups.svg`, each atomically."""
    svg = speedups(record) if record.results else ""
    html = directory / "bake_off.html"
    write_atomic(html, render_bake_off(record, svg).encode())
    paths = [html]
    if svg:
        figure = directory / "speedups.svg"
        write_atomic(figure, svg.encode())
        paths.append(figure)
    return [*paths, write_record(record, directory / "bake_off.json")]  # last: it says that all is there


def render_bake_off(record: BakeOffRecord, svg: str) -> str:
    """The page around a figure that is drawn already."""
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    reference = read_reference()
    return environment.get_template("bake_off.html.jinja").render(
        record=record,
        answer=answer(record),
        workload=WORKLOAD_LABELS[record.workload],
        headings=HEADINGS,
        cost_headings=COST_HEADINGS,
        paper_headings=PAPER_HEADINGS,
        paper_label=reference.label,
        rows=[
            {
                "kind": "loses" if loses(result) else "",
                "cells": cells(result),
                "costs": cost_cells(result),
                "paper": paper_cells(published(result.entrant, record.workload, reference)),
            }
            for result in record.results
        ],
        machines=list(dict.fromkeys(result.machine for result in record.results if result.machine)),
        figure=Markup(svg),
        style=Markup((here.with_name("report") / "style.css").read_text()),
    )


def speedups(record: BakeOffRecord) -> str:
    """Step and generation speedup of every drafter with their intervals, the shortest step at the top."""

    def draw(axes: Sequence[Axes]) -> None:
        for ax, kind in zip(axes, ("step", "generation"), strict=True):
            for place, result in enumerate(record.results):
                colour = LOSS if loses(result) else ARM_COLOURS[Arm.SPECULATIVE]
                _draw_row(ax, place, result.step if kind == "step" else result.generation, colour=colour)
            ax.axvline(1, color=INK, linewidth=0.9, linestyle="--")
            ax.set(title=f"{kind.capitalize()} speedup over autoregressive", ylim=(len(record.results) - 0.4, -0.6))
            ax.grid(visible=True, axis="x")
            ax.grid(visible=False, axis="y")
            labels = [label(result.entrant) for result in record.results] if kind == "step" else []
            ax.set_yticks(range(len(labels)), labels)

    return draw_svg(2, 0.9 + _ROW_HEIGHT_IN * len(record.results), draw)


def _draw_row(ax: Axes, place: int, estimate: Estimate, *, colour: str) -> None:
    low, high = estimate.ci95 or (estimate.value, estimate.value)
    errors = [[max(0.0, estimate.value - low)], [max(0.0, high - estimate.value)]]
    ax.errorbar([estimate.value], [place], xerr=errors, fmt="o", markersize=5, color=colour, capsize=3)
