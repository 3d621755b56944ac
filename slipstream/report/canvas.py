"""Style of all figures, and their conversion to inline SVG. Colours are Okabe and Ito's, safe for the colour-blind."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from slipstream.statistics import Estimate
from slipstream.types import Arm

ARM_COLOURS = {Arm.AUTOREGRESSIVE: "#6f7681", Arm.SPECULATIVE: "#0072b2"}
STAGE_COLOURS = {
    "data": "#999999",
    "prepare": "#e69f00",
    "generation": "#0072b2",
    "logprob": "#56b4e9",
    "train": "#009e73",
}
LOSS = "#d55e00"
HIGHLIGHT = "#e69f00"
INK = "#30343b"
WIDTH_IN = 10.2
_STYLE = matplotlib.rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=False)


def draw_svg(
    columns: int, height: float, draw: Callable[[Sequence[Axes]], None], *, rows: int = 1, width: float = WIDTH_IN
) -> str:
    """Draw `rows` x `columns` axes with `draw` and return the figure as an SVG element."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, wspace=0.05)  # type: ignore[union-attr]
        draw(figure.subplots(rows, columns, squeeze=False).ravel().tolist())
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None})
    return _inline(file.getvalue())


def errors(estimate: Estimate) -> list[list[float]]:
    """Distances from the value to the ends of its interval, as matplotlib takes one error bar."""
    low, high = estimate.ci95 or (estimate.value, estimate.value)
    return [[max(0.0, estimate.value - low)], [max(0.0, high - estimate.value)]]


def legend_below(axes: Axes, num_columns: int) -> None:
    """Draw the legend of `axes` below its figure."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend(loc="outside lower center", ncols=num_columns, columnspacing=1.4, handlelength=1.0)


def _inline(svg: str) -> str:
    """Strip the XML header and make the ids unique on the page."""
    svg = svg[svg.index("<svg") :]
    prefix = f"f{zlib.crc32(svg.encode()):08x}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = svg.replace('href="#', f'href="#{prefix}').replace("url(#", f"url(#{prefix}")
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # Hundredths of a point are enough for a coordinate. Text between the tags stays as it is.
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag.group()), svg)
