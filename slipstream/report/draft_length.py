"""What the page says of the draft length by running batch, and of the autopilot."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.drafts.length import DraftLength, described
from slipstream.records.run import RunRecord
from slipstream.records.stages import RunningPoint
from slipstream.records.steps import ArmRecord, StepRecord
from slipstream.report.formats import speedup
from slipstream.report.tables import ColumnGroup, Row, Table
from slipstream.types import Arm


def arm_length(arm: ArmRecord) -> str:
    """An arm's k, in words where it goes by the running batch."""
    length = DraftLength(num_speculative_tokens=arm.num_speculative_tokens, schedule=arm.schedule)
    return length.label if length.label != "by_batch" else f"by running batch ({described(length.schedule)})"


def running_table(record: RunRecord) -> Table:
    """How fast every k was at every running batch, over k = 0 there, and which one the schedule has."""
    tuning = record.tuning
    kinds = sorted({_kind(point) for point in tuning.running})
    points = {(point.batch_from, *_kind(point)): point for point in tuning.running}
    rows = []
    for start, end in sorted({(point.batch_from, point.batch_to) for point in tuning.running}):
        chosen = next(e.num_speculative_tokens for e in tuning.schedule if e.batch_from <= start <= e.batch_to)
        cells = tuple(_cell(points.get((start, *kind))) for kind in kinds)
        label = str(start) if start == end else f"{start} to {end}"
        emphasis = "" if chosen == tuning.chosen_k else "chosen"
        rows.append(Row(label=label, cells=(*cells, f"k = {chosen}"), kind=emphasis))
    columns = tuple("drafts switched off" if is_off else f"k = {k}" for k, is_off in kinds)
    measured = ColumnGroup(heading="speedup over k = 0, measured", columns=columns)
    return Table(
        label="running batch", groups=(measured, ColumnGroup(heading="", columns=("schedule",))), rows=tuple(rows)
    )


def schedule_text(record: RunRecord) -> str:
    """The schedule, what it is expected to gain, and whether the arm drafted by it."""
    tuning = record.tuning
    if len({entry.num_speculative_tokens for entry in tuning.schedule}) < 2:
        return f"No running batch wants another draft length: k = {tuning.chosen_k} everywhere."
    arm = next((arm for arm in record.arms if arm.arm is Arm.SPECULATIVE), None)
    used = "The speculative arm drafted by it." if arm and arm.schedule else "The arm drafted with one k all the same."
    return (
        f"By running batch: {described(tuning.schedule)}. By these times it decodes {speedup(tuning.schedule_gain)} as "
        f"fast as k = {tuning.chosen_k} throughout. {used}"
    )


def autopilot_text(record: RunRecord) -> str:
    """What the autopilot did; empty where none was on."""
    steps = [step for arm in record.arms for step in arm.steps if step.autopilot is not None]
    if not steps:
        return ""
    without = sum(not step.autopilot.speculates for step in steps if step.autopilot)
    probes = sum(step.autopilot.is_probe for step in steps if step.autopilot)
    turns = _turns(steps)
    told = f" It turned at {turns}." if turns else " It never turned speculation off."
    return (
        f"The autopilot had {without} of {len(steps)} steps generate without drafts, {probes} steps were probes.{told}"
    )


def _turns(steps: Sequence[StepRecord]) -> str:
    words = {True: "on again", False: "off"}
    turned = [step for step in steps if step.autopilot and step.autopilot.has_switched]
    return ", ".join(f"step {step.step + 1} ({words[step.autopilot.speculates]})" for step in turned if step.autopilot)


def _kind(point: RunningPoint) -> tuple[int, bool]:
    return point.k, point.is_switched_off


def _cell(point: RunningPoint | None) -> str:
    return "" if point is None or point.speedup is None else speedup(point.speedup)
