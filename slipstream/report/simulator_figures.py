"""Figures of the simulator. Every one shows projected values, but for the scatter, whose axes keep the two apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from slipstream.report.canvas import ARM_COLOURS, HIGHLIGHT, INK, LOSS, STAGE_COLOURS, draw_svg
from slipstream.report.formats import seconds
from slipstream.simulator.calibration import CalibrationRecord
from slipstream.simulator.projection_record import LagLine, RunningBatch, SpeedupMap
from slipstream.types import Arm, StageTimes

_LAG_COLOURS = ("#6f7681", "#56b4e9", "#0072b2", "#009e73", "#e69f00")


def speedup_map(surface: SpeedupMap) -> str:
    """Projected rollout speedup over k and acceptance length; blank where the length exceeds k + 1."""
    ks, acceptance_lengths = surface.ks, surface.acceptance_lengths
    speedups = np.array([[np.nan if x is None else x for x in row] for row in surface.rollout_speedups])

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        top = float(np.nanmax(speedups))
        shown = np.ma.masked_invalid(speedups.T)
        norm = TwoSlopeNorm(1.0, vmin=min(0.5, float(np.nanmin(speedups))), vmax=max(top, 1.5))
        mesh = ax.pcolormesh(ks, acceptance_lengths, shown, cmap="RdBu", norm=norm)
        if float(np.nanmin(speedups)) < 1 < top:
            ax.contour(ks, acceptance_lengths, shown, levels=[1.0], colors=[INK], linewidths=0.9)
        ax.set(xlabel="draft length k", ylabel="acceptance length", title="Projected rollout speedup (line: no gain)")
        ax.grid(visible=False)
        figure = ax.get_figure(root=True)
        assert figure is not None
        figure.colorbar(mesh, ax=ax)

    return draw_svg(1, 3.2, draw, width=5.6)


def speedup_over_gpus(lines: Sequence[LagLine]) -> str:
    """Projected step speedup over the number of GPUs, a line a policy lag."""

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        for index, line in enumerate(lines):
            label = f"lag {line.lag}" if line.lag else "synchronous"
            colour = _LAG_COLOURS[index % len(_LAG_COLOURS)]
            ax.plot(line.num_gpus, line.step_speedups, "o-", markersize=3.5, color=colour, label=label)
        ax.axhline(1, color=LOSS, linewidth=0.9, linestyle="--")
        ax.set_xscale("log", base=2)
        ticks = sorted({gpus for line in lines for gpus in line.num_gpus})
        ax.set_xticks(ticks, [str(gpus) for gpus in ticks])
        ax.set(xlabel="GPUs", title="Projected step speedup")
        ax.legend(loc="best")

    return draw_svg(1, 2.7, draw, width=5.6)


def stage_waterfall(autoregressive: StageTimes, speculative: StageTimes) -> str:
    """From the projected autoregressive step to the speculative one, stage by stage."""
    before, after = autoregressive.by_stage(), speculative.by_stage()

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        ax.bar(0, autoregressive.step_s, width=0.6, color=ARM_COLOURS[Arm.AUTOREGRESSIVE])
        level = autoregressive.step_s
        for x, stage in enumerate(before, start=1):
            change = after[stage] - before[stage]
            ax.bar(x, change, bottom=level, width=0.6, color=STAGE_COLOURS[stage])
            ax.annotate(
                f"{change:+.1f}", (x, max(level, level + change)), (0, 3), textcoords="offset points", ha="center"
            )
            level += change
        ax.bar(len(before) + 1, speculative.step_s, width=0.6, color=ARM_COLOURS[Arm.SPECULATIVE])
        for x, value in ((0, autoregressive.step_s), (len(before) + 1, speculative.step_s)):
            ax.annotate(seconds(value), (x, value), (0, 3), textcoords="offset points", ha="center")
        ax.set_xticks(range(len(before) + 2), ["autoregressive", *before, "speculative"])
        ax.set(title="Projected step, seconds", ylim=(0, 1.15 * max(autoregressive.step_s, speculative.step_s)))

    return draw_svg(1, 2.7, draw, width=7.4)


def measured_against_simulated(calibrations: Sequence[CalibrationRecord]) -> str:
    """Generation times that were fitted, a panel a calibration: measured across, simulated up."""

    def draw(axes: Sequence[Axes]) -> None:
        for ax, record in zip(axes, calibrations, strict=True):
            measured = [cell.measured_s for cell in record.cells]
            simulated = [cell.simulated_s for cell in record.cells]
            low, high = 0.9 * min(*measured, *simulated), 1.1 * max(*measured, *simulated)
            ax.plot([low, high], [low, high], color=INK, linewidth=0.8)
            ax.fill_between([low, high], [0.92 * low, 0.92 * high], [1.08 * low, 1.08 * high], color="#e7e9ee")
            ax.plot(measured, simulated, "o", markersize=4, color=ARM_COLOURS[Arm.SPECULATIVE])
            ax.set(xlabel="measured, s", ylabel="simulated, s", title=f"{record.source} (grey: within 8 %)")

    return draw_svg(len(calibrations), 3.0, draw, width=4.6 * len(calibrations))


def running_batch(rollouts: Sequence[RunningBatch]) -> str:
    """Sequences of the slowest engine that still run, over projected time: the tail that keeps a step waiting."""

    def draw(axes: Sequence[Axes]) -> None:
        ax = axes[0]
        colours = (ARM_COLOURS[Arm.AUTOREGRESSIVE], ARM_COLOURS[Arm.SPECULATIVE], HIGHLIGHT)
        for index, rollout in enumerate(rollouts):
            edges = np.concatenate([[0.0], np.cumsum(rollout.span_s)])
            colour = colours[index % len(colours)]
            ax.stairs(rollout.batch, edges, color=colour, label=rollout.label, linewidth=1.5)
        ax.set(xlabel="projected seconds", title="Running sequences of the slowest engine")
        ax.set_ylim(bottom=0)
        ax.legend(loc="best")

    return draw_svg(1, 2.5, draw, width=5.6)
