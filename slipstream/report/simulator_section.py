"""Projections on the report page, and the simulator's prediction of the asynchronous arms.

Projected figures have columns and figures of their own. Only the scatter plot shows both, on separate axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from slipstream.catalog import target_of
from slipstream.records.run import RunRecord
from slipstream.report import tables
from slipstream.report.figures import ARM_COLOURS, INK, LOSS, draw_svg
from slipstream.report.summary import LoopComparison
from slipstream.simulator.balance import AsynchronousPrediction, balance, predict_asynchronous
from slipstream.simulator.calibration import CalibrationRecord
from slipstream.simulator.projection import LagLine, ProjectionRecord, SpeedupMap
from slipstream.types import Arm, LoopMode

_LAG_COLOURS = ("#6f7681", "#56b4e9", "#0072b2", "#009e73", "#e69f00")


def predicted(record: RunRecord, compared: LoopComparison | None) -> AsynchronousPrediction | None:
    """Predict the asynchronous arms; None for a run without a lag, or on hardware other than CPU cores."""
    arms = () if compared is None else compared.asynchronous
    if not arms or arms[0].max_off_policy_steps < 1 or not _is_on_cores(record):
        return None
    return predict_asynchronous(
        [arm for arm in record.arms if any(arm.arm is each.arm for each in arms)],
        lag=arms[0].max_off_policy_steps,
        mode=LoopMode(arms[0].loop),
        has_logprob_pass=any(step.has_logprob_pass for arm in record.asynchronous for step in arm.steps),
        idle_core_helps=True,  # engine and learner share a host's cores, so either uses the other's idle core
    )


def _is_on_cores(record: RunRecord) -> bool:
    return record.layout is not None and target_of(record.layout.hardware) == "cpu"


def split_text(prediction: AsynchronousPrediction) -> str:
    """State what the simulator expects of two cores, which have only one split."""
    bounds = " and ".join(f"the {arm.arm.value} step to be bound by its {arm.bound.value}" for arm in prediction.arms)
    return (
        f"Two cores have one split, one core for generation and one for training. On it the simulator expects {bounds}."
    )


def split_table(record: RunRecord, compared: LoopComparison) -> tables.Table | None:
    """Tabulate each arm's projected step on every split of the run's GPUs; None without a lag, or on CPU cores.

    Two cores have one split, which `split_text` describes instead.
    """
    first, layout = compared.asynchronous[0], record.layout
    if first.max_off_policy_steps < 1 or layout is None or _is_on_cores(record):
        return None
    if layout.num_gpus <= layout.gpus_per_engine:  # no GPU is left for training
        return None
    return tables.split_table(balance(record, lag=first.max_off_policy_steps, mode=LoopMode(first.loop)))


def projection_figures(projection: ProjectionRecord) -> dict[str, str]:
    """Draw the figures of the projection; returns SVG by name."""
    drawn = projection.figures
    calibrations = [each for each in (projection.run_calibration, projection.paper_calibration) if each is not None]
    return {
        "projection_fits": measured_against_simulated(calibrations),
        "projection_map": speedup_map(drawn.speedup_map),
        "projection_gpus": speedup_over_gpus(drawn.lag_lines),
    }


def speedup_map(surface: SpeedupMap) -> str:
    """Draw projected rollout speedup over k and acceptance length; lengths above k + 1 are blank."""
    ks, acceptance_lengths = surface.ks, surface.acceptance_lengths
    speedups = np.array([[np.nan if x is None else x for x in row] for row in surface.rollout_speedups])

    def draw(ax: Axes) -> None:
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
    """Draw projected step speedup over the number of GPUs, one line a policy lag."""

    def draw(ax: Axes) -> None:
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


def measured_against_simulated(calibrations: Sequence[CalibrationRecord]) -> str:
    """Draw simulated over measured generation times, one panel a calibration."""

    def draw(*axes: Axes) -> None:
        for ax, record in zip(axes, calibrations, strict=True):
            measured = [cell.measured_s for cell in record.cells]
            simulated = [cell.simulated_s for cell in record.cells]
            low, high = 0.9 * min(*measured, *simulated), 1.1 * max(*measured, *simulated)
            ax.plot([low, high], [low, high], color=INK, linewidth=0.8)
            ax.fill_between([low, high], [0.92 * low, 0.92 * high], [1.08 * low, 1.08 * high], color="#e7e9ee")
            ax.plot(measured, simulated, "o", markersize=4, color=ARM_COLOURS[Arm.SPECULATIVE])
            ax.set(xlabel="measured, s", ylabel="simulated, s", title=f"{record.source} (grey: within 8 %)")

    return draw_svg(len(calibrations), 3.0, draw, width=4.6 * len(calibrations))
