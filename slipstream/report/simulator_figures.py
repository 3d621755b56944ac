"""Figures of the simulator. Every one shows projected values, but for the scatter, whose axes keep the two apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from slipstream.projection import CalibrationRecord
from slipstream.report.figures import _ARM_COLOURS, _HIGHLIGHT, _INK, _LOSS, _STAGE_COLOURS, _draw
from slipstream.report.formats import seconds
from slipstream.sim.rollout import Trace
from slipstream.sim.step import Step
from slipstream.types import Arm

Array = NDArray[np.float64]
_LAG_COLOURS = ("#6f7681", "#56b4e9", "#0072b2", "#009e73", "#e69f00")


def speedup_map(ks: Sequence[int], acceptance_lengths: Sequence[float], speedups: Array) -> str:
    """Projected rollout speedup over k and acceptance length; blank where the length exceeds k + 1.

    Args:
        speedups: [len(ks), len(acceptance_lengths)], NaN for blank.
    """

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        top = float(np.nanmax(speedups))
        shown = np.ma.masked_invalid(speedups.T)
        mesh = ax.pcolormesh(ks, acceptance_lengths, shown, cmap="RdBu", vmin=2 - max(top, 1.5), vmax=max(top, 1.5))
        if float(np.nanmin(speedups)) < 1 < top:
            ax.contour(ks, acceptance_lengths, shown, levels=[1.0], colors=[_INK], linewidths=0.9)
        ax.set(xlabel="draft length k", ylabel="acceptance length", title="Projected rollout speedup (line: no gain)")
        ax.grid(visible=False)
        figure = ax.get_figure(root=True)
        assert figure is not None
        figure.colorbar(mesh, ax=ax)

    return _draw(1, 3.2, draw, width=5.6)


def speedup_over_gpus(num_gpus: Sequence[int], speedups_by_lag: Mapping[int, Sequence[float]]) -> str:
    """Projected step speedup over the number of GPUs, a line a policy lag."""

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        for index, (lag, speedups) in enumerate(speedups_by_lag.items()):
            label = f"lag {lag}" if lag else "synchronous"
            ax.plot(
                num_gpus, speedups, "o-", markersize=3.5, color=_LAG_COLOURS[index % len(_LAG_COLOURS)], label=label
            )
        ax.axhline(1, color=_LOSS, linewidth=0.9, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.set_xticks(num_gpus, [str(gpus) for gpus in num_gpus])
        ax.set(xlabel="GPUs", title="Projected step speedup")
        ax.legend(loc="best")

    return _draw(1, 2.7, draw, width=5.6)


def stage_waterfall(autoregressive: Step, speculative: Step) -> str:
    """From the projected autoregressive step to the speculative one, stage by stage."""
    before, after = autoregressive.by_stage(), speculative.by_stage()

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        ax.bar(0, autoregressive.step_s, width=0.6, color=_ARM_COLOURS[Arm.AUTOREGRESSIVE])
        level = autoregressive.step_s
        for x, stage in enumerate(before, start=1):
            change = after[stage] - before[stage]
            ax.bar(x, change, bottom=level, width=0.6, color=_STAGE_COLOURS[stage])
            ax.annotate(
                f"{change:+.1f}", (x, max(level, level + change)), (0, 3), textcoords="offset points", ha="center"
            )
            level += change
        ax.bar(len(before) + 1, speculative.step_s, width=0.6, color=_ARM_COLOURS[Arm.SPECULATIVE])
        for x, value in ((0, autoregressive.step_s), (len(before) + 1, speculative.step_s)):
            ax.annotate(seconds(value), (x, value), (0, 3), textcoords="offset points", ha="center")
        ax.set_xticks(range(len(before) + 2), ["autoregressive", *before, "speculative"])
        ax.set(title="Projected step, seconds", ylim=(0, 1.15 * max(autoregressive.step_s, speculative.step_s)))

    return _draw(1, 2.7, draw, width=7.4)


def measured_against_simulated(calibrations: Sequence[CalibrationRecord]) -> str:
    """Generation times that were fitted, a panel a calibration: measured across, simulated up."""

    def draw(axes: Sequence[Axes]) -> None:
        for ax, record in zip(axes, calibrations, strict=True):
            measured = [cell.measured_s for cell in record.cells]
            simulated = [cell.simulated_s for cell in record.cells]
            low, high = 0.9 * min(*measured, *simulated), 1.1 * max(*measured, *simulated)
            ax.plot([low, high], [low, high], color=_INK, linewidth=0.8)
            ax.fill_between([low, high], [0.92 * low, 0.92 * high], [1.08 * low, 1.08 * high], color="#e7e9ee")
            ax.plot(measured, simulated, "o", markersize=4, color=_ARM_COLOURS[Arm.SPECULATIVE])
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.set(xlabel="measured, s", ylabel="simulated, s", title=f"{record.source} (grey: within 8 %)")

    return _draw(len(calibrations), 3.0, draw, width=4.6 * len(calibrations))


def running_batch(traces: Mapping[str, tuple[Trace, Array]]) -> str:
    """Sequences of the slowest engine that still run, over projected time: the tail that keeps a step waiting.

    Args:
        traces: a rollout and the seconds of each of its spans, by label.
    """

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        colours = (_ARM_COLOURS[Arm.AUTOREGRESSIVE], _ARM_COLOURS[Arm.SPECULATIVE], _HIGHLIGHT)
        for index, (label, (trace, span_s)) in enumerate(traces.items()):
            edges = np.concatenate([[0.0], np.cumsum(span_s)])
            ax.stairs(trace.batch_S, edges, color=colours[index % len(colours)], label=label, linewidth=1.5)
        ax.set(xlabel="projected seconds", title="Running sequences of the slowest engine")
        ax.set_ylim(bottom=0)
        ax.legend(loc="best")

    return _draw(1, 2.5, draw, width=5.6)
