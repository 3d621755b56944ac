"""The asynchronous arms as the simulator predicts them from the synchronous ones, and which split it would choose."""

from __future__ import annotations

from slipstream.records.run import RunRecord
from slipstream.report.asynchronous_arms import LoopComparison
from slipstream.report.formats import POLICY_LABELS, seconds
from slipstream.report.tables import ColumnGroup, Row, Table
from slipstream.simulator.balance import (
    AsynchronousPrediction,
    PredictedArm,
    balance,
    predict_asynchronous,
)
from slipstream.types import Arm, LoopMode

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


def split_text(prediction: AsynchronousPrediction) -> str:
    """What `slipstream simulate balance` says of two cores, which have one split."""
    bounds = " and ".join(f"the {arm.arm.value} step to be bound by its {arm.bound.value}" for arm in prediction.arms)
    return (
        f"Two cores have one split, one core for generation and one for training. On it the simulator expects {bounds}."
    )


def split_table(record: RunRecord, compared: LoopComparison) -> Table | None:
    """The projected step of each arm on every split of the run's GPUs; None of a run without a lag, or on cores.

    Two cores have one split, and so a sentence in place of a table: `split_text`.
    """
    first, layout = compared.asynchronous[0], record.layout
    if first.max_off_policy_steps < 1 or layout is None or layout.hardware.startswith(_ON_CORES):
        return None
    if layout.num_gpus <= layout.gpus_per_engine:  # no GPU is left for training
        return None
    found = balance(record, lag=first.max_off_policy_steps, mode=LoopMode(first.loop))
    arms = [Arm(name) for name in found.synchronous_step_s]
    best = {arm: found.best(arm) for arm in arms}
    by_split: dict[tuple[int, int], list[str]] = {}
    for row in found.rows:
        mark = ", fastest" if row is best[row.arm] else ""
        cells = by_split.setdefault((row.generation, row.training), [])
        cells += [seconds(row.step_s), seconds(row.exposed_s), f"{row.bound}{mark}"]
    columns = ("step s", "exposed s", "bound by")
    return Table(
        label="GPUs that generate + train",
        groups=tuple(ColumnGroup(heading=f"{arm.value}, projected", columns=columns) for arm in arms),
        rows=tuple(Row(label=f"{split[0]} + {split[1]}", cells=tuple(cells)) for split, cells in by_split.items()),
    )


def _projected(arm: PredictedArm, measured_s: float) -> tuple[str, ...]:
    return (
        seconds(arm.step_s),
        f"{seconds(arm.step_p10_s)} to {seconds(arm.step_p90_s)}",
        seconds(arm.exposed_s),
        seconds(arm.hidden_s),
        f"{arm.step_s / measured_s - 1:+.0%}",
    )
