"""Projections on the report page, and the simulator's prediction of the asynchronous arms.

Projected figures have columns and figures of their own. Only the scatter plot shows both, on separate axes.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from slipstream.catalog import target_of
from slipstream.records.run import RunRecord
from slipstream.report import tables
from slipstream.report.figures import ARM_COLOURS, INK, draw_svg
from slipstream.report.summary import LoopComparison
from slipstream.simulator.balance import AsynchronousPrediction, balance, predict_asynchronous
from slipstream.simulator.calibration import CalibrationRecord
from slipstream.types import Arm, LoopMode


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
