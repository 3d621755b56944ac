"""The asynchronous arms as the simulator predicts them from the synchronous ones, beside what was measured."""

from __future__ import annotations

from slipstream.records import RunRecord
from slipstream.report.asynchronous import LoopComparison
from slipstream.report.formats import POLICY_LABELS, seconds
from slipstream.report.tables import ColumnGroup, Row, Table
from slipstream.simulator.project.asynchronous import AsynchronousPrediction, PredictedArm, predict_asynchronous
from slipstream.types import LoopMode

_ON_CORES = "cpu"  # how the simulator's hardware begins that has engine and learner on a core each


def predicted(record: RunRecord, compared: LoopComparison) -> AsynchronousPrediction | None:
    """What the simulator says; None of a run without a lag, or on other hardware than it predicts from."""
    arms = compared.asynchronous
    lag = arms[0].max_off_policy_steps
    if lag < 1 or record.layout is None or not record.layout.hardware.startswith(_ON_CORES):
        return None
    return predict_asynchronous(
        [arm for arm in record.arms if any(arm.arm is each.arm for each in arms)],
        lag=lag,
        mode=LoopMode(arms[0].loop),
        has_logprob_pass=any(step.has_logprob_pass for arm in record.asynchronous for step in arm.steps),
        idle_core_helps=True,  # engine and learner share the cores of a host, and who is alone has all of them
    )


def prediction_table(prediction: AsynchronousPrediction, compared: LoopComparison) -> Table:
    """The mean step of each asynchronous arm, its exposed and its hidden generation: measured, and predicted."""
    groups = (
        ColumnGroup(heading="measured", columns=("step s", "exposed s", "hidden s")),
        ColumnGroup(heading="projected", columns=("step s", "p10 to p90", "exposed s", "hidden s", "step's error")),
    )
    found = {arm.arm: arm for arm in prediction.arms}
    rows = []
    for arm in compared.asynchronous:
        each = found[arm.arm]
        measured = (seconds(arm.step_s), seconds(arm.exposed_s), seconds(arm.hidden_s))
        rows.append(Row(label=POLICY_LABELS[arm.name], cells=(*measured, *_projected(each, arm.step_s))))
    return Table(label="mean step", groups=groups, rows=tuple(rows))


def _projected(arm: PredictedArm, measured_s: float) -> tuple[str, ...]:
    return (
        seconds(arm.step_s),
        f"{seconds(arm.step_p10_s)} to {seconds(arm.step_p90_s)}",
        seconds(arm.exposed_s),
        seconds(arm.hidden_s),
        f"{arm.step_s / measured_s - 1:+.0%}",
    )
