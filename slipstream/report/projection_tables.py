"""The tables of the page's projection: measured and projected figures in columns of their own."""

from __future__ import annotations

from slipstream.report.formats import seconds, speedup
from slipstream.report.tables import ColumnGroup, Row, Table
from slipstream.simulator.projection_record import ProjectionRecord
from slipstream.statistics import Spread


def check_table(projection: ProjectionRecord) -> Table | None:
    """The speculative arm, which the calibration never saw; None without one."""
    check = projection.run_check
    if check is None:
        return None
    error = check.predicted_s / check.measured_s - 1
    cells = (
        seconds(check.measured_s),
        seconds(check.predicted_s),
        f"{seconds(check.predicted_p10_s)} to {seconds(check.predicted_p90_s)}",
        f"{error:+.0%}",
    )
    groups = (
        ColumnGroup(heading="measured", columns=("generation s",)),
        ColumnGroup(heading="projected", columns=("generation s", "p10 to p90", "error")),
    )
    return Table(label="speculative arm", groups=groups, rows=(Row(label=f"k = {check.k}", cells=cells),))


def own_table(projection: ProjectionRecord) -> Table:
    """Other draft lengths on the machine of the run."""
    rows = tuple(
        Row(
            label=f"k = {point.k}",
            cells=(f"{point.acceptance_length:.2f}", _band(point.rollout_speedup), _band(point.step_speedup)),
        )
        for point in projection.from_run
    )
    groups = (
        ColumnGroup(heading="assumed", columns=("acceptance length",)),
        ColumnGroup(heading="projected, p10 to p90", columns=("generation speedup", "step speedup")),
    )
    return Table(label="this machine", groups=groups, rows=rows)


def published_table(projection: ProjectionRecord) -> Table:
    """The settings that the reference projected: its figures, and ours from its measured ones."""
    rows = tuple(
        Row(
            label=f"{point.calibrated.num_gpus} GPUs, lag {point.calibrated.lag}, k = {point.calibrated.k}, "
            f"AL {point.calibrated.acceptance_length:.1f}",
            cells=(
                _band(point.calibrated.rollout_speedup),
                _band(point.calibrated.step_speedup),
                speedup(point.ideal.rollout_speedup.median),
                speedup(point.ideal.step_speedup.median),
                speedup(point.published_rollout_speedup),
                speedup(point.published_step_speedup),
            ),
        )
        for point in projection.from_paper
    )
    groups = (
        ColumnGroup(heading="projected here, calibrated", columns=("rollout", "step")),
        ColumnGroup(heading="projected here, ideal stack", columns=("rollout", "step")),
        ColumnGroup(heading="projected by the reference", columns=("rollout", "step"), quoted=True),
    )
    return Table(label="Qwen3-235B-A22B", groups=groups, rows=rows)


def _band(band: Spread) -> str:
    return f"{speedup(band.median)} ({band.p10:.2f} to {band.p90:.2f})"
