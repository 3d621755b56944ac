"""Figures of measured values on the report page, and the style and SVG of all figures.

Colours are Okabe and Ito's, safe for the colour-blind.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slipstream.records.run import RunRecord
from slipstream.records.stages import CertificateRecord, SweepPoint
from slipstream.records.steps import StepRecord
from slipstream.report.formats import POLICY_LABELS, percent, seconds, speedup
from slipstream.report.summary import LoopArm, LoopComparison, RunSummary, accuracy_curves, decided_steps
from slipstream.simulator.calibration import CalibrationRecord
from slipstream.simulator.reference import WorkloadReference, read_reference
from slipstream.statistics import Estimate, moving_average
from slipstream.types import STAGES, Arm

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
_LANE = 0.38  # height of a lane in `step_lanes`, of an arm's 1
_WAITING = "#f2f3f5"


def draw_svg(columns: int, height: float, draw: Callable[..., None], *, rows: int = 1, width: float = WIDTH_IN) -> str:
    """Let `draw` draw on `rows` x `columns` axes, which it gets row by row; return the figure as an SVG element."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, wspace=0.05)  # type: ignore[union-attr]
        draw(*figure.subplots(rows, columns, squeeze=False).ravel())
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


def stage_bars(run: RunSummary, workload: WorkloadReference | None) -> str:
    """Draw the median seconds of each stage as one stacked bar an arm; published ones have an axis of their own."""
    measured = {arm.arm.value: {stage: arm.stages[stage].median for stage in STAGES} for arm in run.arms}
    panels = {"this run, measured": measured}
    if workload is not None:
        panels[read_reference().label] = {arm.value: workload.times(arm).by_stage() for arm in Arm}

    def draw(*axes: Axes) -> None:
        for ax, (title, bars) in zip(axes, panels.items(), strict=True):
            _stacked(ax, title, bars)
            if ax is axes[0]:
                legend_below(ax, len(STAGES))

    return draw_svg(len(panels), 1.8, draw)


def step_times(record: RunRecord) -> str:
    """Draw the seconds of generation and of the whole step over steps."""

    def draw(generation: Axes, whole: Axes) -> None:
        _over_steps(generation, "Generation, seconds", record, lambda step: step.times.generation_s)
        _over_steps(whole, "Whole step, seconds", record, lambda step: step.times.step_s)
        _from_zero(generation)
        _from_zero(whole)
        generation.legend(loc="lower right", ncols=2)

    return draw_svg(2, 2.5, draw)


def acceptance(record: RunRecord, run: RunSummary) -> str:
    """Draw acceptance by draft position, with the held-out rates, and acceptance length over steps.

    Empty where nothing was drafted and no held-out rate is known.
    """
    measured = run.acceptance.rate_by_position if run.acceptance else ()
    # Recorded held-out rates are conditional on the positions before; the engine counts joint acceptance.
    held_out = np.cumprod(record.draft.heldout_rate_by_position if record.draft is not None else ())
    k = len(measured) or len(held_out)
    if not k:
        return ""

    def draw(by_position: Axes, *over_steps: Axes) -> None:
        if measured:
            bars = by_position.bar(range(1, k + 1), measured, width=0.6, color=ARM_COLOURS[Arm.SPECULATIVE])
            bars.set_label("during RL")
            by_position.bar_label(bars, [percent(rate) for rate in measured], label_type="center", color="white")
        for ax in over_steps:
            title = f"Mean acceptance length (at most {k + 1})"
            _over_steps(ax, title, record, lambda s: s.acceptance.mean_acceptance_length if s.acceptance else None)
            ax.set_ylim(1, k + 1.05)
        shown = held_out[:k]
        if len(shown):
            positions, label = range(1, len(shown) + 1), "held out, before RL"
            by_position.plot(positions, shown, "D", color=HIGHLIGHT, markeredgecolor="white", label=label)
        by_position.set(title="Accepted, by draft position", xlabel="draft position", ylim=(0, 1.08))
        by_position.set_xlim(0.4, k + 0.6)
        _whole(by_position)
        by_position.legend(loc="upper right")

    return draw_svg(2, 2.5, draw) if measured else draw_svg(1, 2.5, draw, width=WIDTH_IN / 2)


def sweep(points: Sequence[SweepPoint], chosen_k: int) -> str:
    """Draw generation time and acceptance length over k, one column a batch size; k slower than k = 0 is hatched."""
    batches = sorted({point.batch for point in points})

    def draw(*axes: Axes) -> None:
        for column, batch in enumerate(batches):
            of_batch = sorted((point for point in points if point.batch == batch), key=lambda point: point.k)
            _sweep_times(axes[column], of_batch, chosen_k)
            _sweep_lengths(axes[len(batches) + column], of_batch)
            axes[column].set_title(f"batch {batch}")
        axes[0].set_ylabel("generation, s")
        axes[len(batches)].set_ylabel("mean acceptance length")

    return draw_svg(len(batches), 3.9, draw, rows=2, width=max(3.4, min(WIDTH_IN, 3.1 * len(batches))))


def learning(record: RunRecord) -> str:
    """Draw reward and accuracy of both arms over steps."""

    def draw(rewards: Axes, accuracies: Axes) -> None:
        title = "Mean reward of a step (thin) and its moving average"
        _over_steps(rewards, title, record, lambda step: step.reward_mean, smooth=True)
        _from_zero(rewards)
        rewards.legend(loc="lower right", ncols=2)
        _accuracies(accuracies, record)

    return draw_svg(2, 2.7, draw)


def mismatch(record: RunRecord) -> str:
    """Draw the difference between the learner's and the engine's log-probabilities of the same tokens."""

    def draw(means: Axes, largest: Axes) -> None:
        _over_steps(means, "Mismatch KL (mean of rollout - trainer logprob)", record, lambda step: step.mismatch.k1)
        _over_steps(largest, "Largest difference of a token", record, lambda step: step.mismatch.largest)
        _from_zero(largest)
        means.legend(loc="best", ncols=2)

    return draw_svg(2, 2.2, draw)


def uniforms(certificate: CertificateRecord) -> str:
    """Draw histograms of probability integral transforms by draft position; an exact engine gives flat ones."""
    histograms = certificate.pit_histograms
    columns = min(len(histograms), 5)
    rows = -(-len(histograms) // columns)

    def draw(*axes: Axes) -> None:
        for ax in axes[len(histograms) :]:
            ax.set_visible(False)
        for ax, (name, counts) in zip(axes, histograms.items(), strict=False):
            total, bins = sum(counts), len(counts)
            expected = total / bins
            spread = 1.96 * (expected * (1 - 1 / bins)) ** 0.5
            ax.bar((np.arange(bins) + 0.5) / bins, counts, width=0.9 / bins, color=ARM_COLOURS[Arm.SPECULATIVE])
            ax.axhspan(expected - spread, expected + spread, color=HIGHLIGHT, alpha=0.25, linewidth=0)
            ax.axhline(expected, color=INK, linewidth=0.8)
            ax.set(title=f"{name}: {total:,}", xticks=(0, 1), xlabel="u")
            _from_zero(ax)

    return draw_svg(columns, 1.9 * rows, draw, rows=rows)


def measured_against_simulated(calibration: CalibrationRecord) -> str:
    """Draw simulated over measured generation times."""
    measured = [cell.measured_s for cell in calibration.cells]
    simulated = [cell.simulated_s for cell in calibration.cells]
    low, high = 0.9 * min(*measured, *simulated), 1.1 * max(*measured, *simulated)

    def draw(ax: Axes) -> None:
        ax.plot([low, high], [low, high], color=INK, linewidth=0.8)
        ax.fill_between([low, high], [0.92 * low, 0.92 * high], [1.08 * low, 1.08 * high], color="#e7e9ee")
        ax.plot(measured, simulated, "o", markersize=4, color=ARM_COLOURS[Arm.SPECULATIVE])
        ax.set(xlabel="measured, s", ylabel="simulated, s", title="Generation (grey: within 8 %)")

    return draw_svg(1, 3.0, draw, width=4.6)


def step_lanes(compared: LoopComparison) -> str:
    """Draw when engines and learner work and wait in the mean step of every arm."""

    def draw(ax: Axes) -> None:
        longest = max(arm.step_s for arm in compared.arms)
        for row, arm in enumerate(compared.arms):
            _lane(ax, row, _engine_parts(arm), longest)
            _lane(ax, row + _LANE, _learner_parts(arm), longest)
            text = f"{seconds(arm.step_s)} s"
            ax.text(arm.step_s + 0.01 * longest, row + _LANE / 2, text, va="center", fontweight="bold")
        ax.set_yticks(
            [row + lane for row in range(len(compared.arms)) for lane in (0.0, _LANE)],
            [label for arm in compared.arms for label in (f"{POLICY_LABELS[arm.name]}: engines", "learner")],
        )
        ax.set(xlabel="seconds, mean step", xlim=(0, 1.1 * longest))
        ax.invert_yaxis()
        ax.grid(visible=False)
        for stage, label in (("prepare", "data, refit"), ("generation", "generation"), ("train", "training")):
            ax.barh(0, 0, color=STAGE_COLOURS[stage], label=label)
        ax.barh(0, 0, color=_WAITING, edgecolor="#c4c9d1", label="waiting")
        legend_below(ax, 4)

    return draw_svg(1, 0.72 * len(compared.arms) + 0.7, draw)


def loop_learning(record: RunRecord) -> str:
    """Draw the reward of every arm over steps."""

    def draw(ax: Axes) -> None:
        for arm in (*record.arms, *record.asynchronous):
            values = [step.reward_mean for step in arm.steps]
            smooth = moving_average(values, max(1, len(values) // 6))
            places, line = [step.step for step in arm.steps], "-" if arm.name == arm.arm.value else "--"
            ax.plot(places, smooth, color=ARM_COLOURS[arm.arm], linestyle=line, label=POLICY_LABELS[arm.name])
        ax.set(title="Mean reward of a step, moving average", xlabel="step")
        _whole(ax)
        ax.legend(loc="lower right")

    return draw_svg(1, 2.7, draw, width=WIDTH_IN / 2)


def draft_training(record: RunRecord) -> str:
    """Draw acceptance length, the steps that trained the draft, and both sides of the decision over steps."""
    decided = decided_steps(record)
    places = [step.step for step, _ in decided]
    drafted = [
        (step.step, step.acceptance.mean_acceptance_length) for step, _ in decided if step.acceptance is not None
    ]
    trained = [(step.step, decision.length) for step, decision in decided if decision.trains]
    costs = [(step.step, decision.cost_s) for step, decision in decided if decision.cost_s is not None]

    def draw(lengths: Axes, sides: Axes) -> None:
        lengths.plot(*zip(*drafted, strict=True), color=ARM_COLOURS[Arm.SPECULATIVE], label="of the step")
        known = [decision.reference_length for _, decision in decided]
        lengths.plot(places, known, color=INK, linewidth=0.9, linestyle="--", label="known to be reached")
        if trained:
            marked = "draft trained, recent length"
            lengths.plot(*zip(*trained, strict=True), "o", color=HIGHLIGHT, markersize=4, label=marked)
        saved, lost = [each.saved_s for _, each in decided], [each.lost_s for _, each in decided]
        sides.plot(places, saved, color=ARM_COLOURS[Arm.SPECULATIVE], label="expected to save")
        sides.plot(places, lost, color=HIGHLIGHT, linewidth=0.9, label="lost since the last")
        if costs:
            sides.plot(*zip(*costs, strict=True), color=INK, linestyle="--", label="a training costs")
        sides.set_ylim(bottom=0.0)
        for ax, title in ((lengths, "Mean acceptance length"), (sides, "Seconds behind the decision")):
            ax.set(title=title, xlabel="step")
            _whole(ax)
            ax.legend(loc="best")

    return draw_svg(2, 2.6, draw)


def _stacked(ax: Axes, title: str, bars: dict[str, dict[str, float]]) -> None:
    longest = max(sum(stages.values()) for stages in bars.values())
    for row, stages in enumerate(bars.values()):
        left = 0.0
        for stage, value in stages.items():
            label = stage if row == 0 else None
            ax.barh(row, value, left=left, height=0.62, color=STAGE_COLOURS[stage], label=label, edgecolor="white")
            if value > 0.12 * longest:
                ax.text(left + value / 2, row, seconds(value), ha="center", va="center", color="white")
            left += value
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set(title=title, xlabel="seconds a step", xlim=(0, longest * 1.04))
    ax.invert_yaxis()
    ax.grid(visible=False)


def _over_steps(
    ax: Axes, title: str, record: RunRecord, value: Callable[[StepRecord], float | None], *, smooth: bool = False
) -> None:
    for arm in record.arms:
        pairs = [(step.step, found) for step in arm.steps if (found := value(step)) is not None]
        if not pairs:
            continue
        steps, values = zip(*pairs, strict=True)
        colour, marker = ARM_COLOURS[arm.arm], "o" if len(pairs) < 4 else None
        if smooth:
            ax.plot(steps, values, color=colour, linewidth=0.7, alpha=0.5)
            values = moving_average(values, max(1, len(values) // 6))
        ax.plot(steps, values, color=colour, marker=marker, label=arm.arm.value)
    ax.set(title=title, xlabel="step")
    last = max((step.step for arm in record.arms for step in arm.steps), default=0)
    if last < 4:
        ax.set_xlim(-0.5, last + 0.5)
    _whole(ax)


def _whole(ax: Axes) -> None:
    """Put the ticks of the x axis at whole numbers."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _from_zero(ax: Axes) -> None:
    """Start the y axis at 0, or below the lowest negative value, with headroom for markers."""
    low, high = ax.dataLim.y0, ax.dataLim.y1
    ax.set_ylim(min(0.0, 1.1 * low), 1.1 * high if high > 0 else 1.0)


def _sweep_times(ax: Axes, points: Sequence[SweepPoint], chosen_k: int) -> None:
    baseline = float(np.median([point.autoregressive_s for point in points]))
    ax.axhline(baseline, color=ARM_COLOURS[Arm.AUTOREGRESSIVE], linewidth=1, linestyle="--")
    for x, point in enumerate(points):
        loses = point.k > 0 and point.speedup < 1
        colour = LOSS if loses else ARM_COLOURS[Arm.SPECULATIVE if point.k else Arm.AUTOREGRESSIVE]
        ax.bar(x, point.generation_s, width=0.66, color=colour, hatch="//" if loses else None, edgecolor="white")
        low, high = point.generation_s - point.generation_p10_s, point.generation_p90_s - point.generation_s
        ax.errorbar(x, point.generation_s, yerr=[[max(0, low)], [max(0, high)]], color=INK, capsize=2, linewidth=0.9)
        text = speedup(point.speedup) if point.k else ""
        top = max(point.generation_p90_s, point.generation_s)
        weight = "bold" if point.k == chosen_k and point.k else "normal"
        label = ax.annotate(text, (x, top), (0, 4), textcoords="offset points", ha="center", fontweight=weight)
        label.set(fontsize=7.5, bbox={"facecolor": "white", "linewidth": 0, "pad": 0.8})  # hides the dashed line
    ax.set_xticks(range(len(points)), [str(point.k) for point in points])
    ax.set_ylim(0, 1.14 * max(max(point.generation_p90_s, point.generation_s) for point in points))


def _sweep_lengths(ax: Axes, points: Sequence[SweepPoint]) -> None:
    lengths = [point.mean_acceptance_length for point in points]
    ax.plot(range(len(points)), lengths, marker="o", markersize=4, color=ARM_COLOURS[Arm.SPECULATIVE])
    ax.set_xticks(range(len(points)), [str(point.k) for point in points])
    ax.set(xlabel="draft length k", ylim=(0.8, 1.12 * max(lengths)), xlim=(-0.5, len(points) - 0.5))


def _accuracies(ax: Axes, record: RunRecord) -> None:
    """Draw the accuracy curves of the synchronous arms, shifted a little so that no interval hides another."""
    curves = accuracy_curves(record)
    points = [point for curve in curves.values() for point in curve.values()]
    longest = max((len(arm.steps) for arm in record.arms), default=0)
    for place, arm in enumerate(record.arms):
        curve = curves[arm.name]
        values, steps = [point.avg_at_k for point in curve.values()], np.array(list(curve))
        ends = [point.ci95 or (point.avg_at_k, point.avg_at_k) for point in curve.values()]
        errors = [[max(0, value - low) for value, (low, _) in zip(values, ends, strict=True)]]
        errors += [[max(0, high - value) for value, (_, high) in zip(values, ends, strict=True)]]
        shifted = steps + (place - 0.5) * 0.015 * longest
        ax.errorbar(shifted, values, errors, fmt="o-", color=ARM_COLOURS[arm.arm], markersize=4, capsize=3)
    shown = [0.0, *(value for point in points for value in (point.avg_at_k, *(point.ci95 or ())))]
    limits = 1.18 * min(shown), 1.18 * max(shown) or 1.0
    k = points[0].k if points else 0
    ax.set(title=f"Validation accuracy, avg@{k}, 95 % interval", xlabel="after step", ylim=limits)
    _whole(ax)


Part = tuple[str, float]
"""Stage, empty for a wait, and seconds of a part of a step."""


def _learner_parts(arm: LoopArm) -> list[Part]:
    """Parts of the learner's step; asynchronous arms wait after their work, synchronous ones before it."""
    stages = arm.stages_s
    first, wait = ("prepare", stages["data"] + stages["prepare"]), ("", arm.exposed_s)
    work = [(stage, stages[stage]) for stage in ("logprob", "train")]
    return [first, wait, *work] if arm.is_synchronous else [first, *work, wait]


def _engine_parts(arm: LoopArm) -> list[Part]:
    """Parts of the engines' step: idle before generation, then generation, then idle until the step ends."""
    before_s = arm.stages_s["data"] + arm.stages_s["prepare"]
    busy_s = arm.exposed_s + min(arm.hidden_s, max(0.0, arm.step_s - before_s - arm.exposed_s))
    return [("", before_s), ("generation", busy_s), ("", max(0.0, arm.step_s - before_s - busy_s))]


def _lane(ax: Axes, place: float, parts: Sequence[Part], longest: float) -> None:
    start = 0.0
    for stage, width in parts:
        colour, edge, ink = (STAGE_COLOURS[stage], "white", "white") if stage else (_WAITING, "#c4c9d1", INK)
        ax.barh(place, width, left=start, height=0.9 * _LANE, color=colour, edgecolor=edge, linewidth=0.6)
        if width > 0.07 * longest:
            ax.text(start + width / 2, place, seconds(width), ha="center", va="center", color=ink, fontsize=7.5)
        start += width
