"""The tables of the page, as plain cells. A column is either measured here or quoted, never both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.records.certificate import CertificateRecord
from slipstream.records.run import RunRecord
from slipstream.records.stages import SweepPoint
from slipstream.report.formats import POLICY_LABELS, STAGE_LABELS, count, interval, percent, seconds, speedup
from slipstream.report.reference import Reference, WorkloadReference
from slipstream.report.summary import ArmSummary, RunSummary
from slipstream.statistics import Spread
from slipstream.types import STAGES, Arm


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnGroup:
    """Columns under one heading; `quoted` ones come from a publication and look like it."""

    heading: str
    columns: tuple[str, ...]
    quoted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line: a label, then the cells of every group in turn."""

    label: str
    cells: tuple[str, ...]
    kind: str = ""  # of "total", "baseline", "loses", "chosen": how the page sets it


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table; `cells` of each row match the columns of all groups."""

    label: str
    groups: tuple[ColumnGroup, ...]
    rows: tuple[Row, ...]
    quoted: tuple[bool, ...] = field(init=False)  # of each column

    def __post_init__(self) -> None:
        flags = tuple(group.quoted for group in self.groups for _ in group.columns)
        assert all(len(row.cells) == len(flags) for row in self.rows), self.label
        object.__setattr__(self, "quoted", flags)


def step_table(run: RunSummary, workload: WorkloadReference | None, reference: Reference) -> Table:
    """Seconds a step by stage: both arms, their ratio, and the reference's own three columns."""
    groups = [ColumnGroup(heading=arm.arm.value, columns=("median s", "p10 to p90", "share")) for arm in run.arms]
    groups.append(ColumnGroup(heading="", columns=("ratio",)))
    if workload is not None:
        groups.append(ColumnGroup(heading=reference.label, columns=("AR s", "spec s", "ratio"), quoted=True))
    rows = [_step_row(run, workload, stage) for stage in (*STAGES, None)]
    return Table(label="stage", groups=tuple(groups), rows=tuple(rows))


def speedup_table(run: RunSummary, workload: WorkloadReference | None, reference: Reference) -> Table:
    """The ratios of the two arms, with their intervals."""
    comparison = run.comparison
    assert comparison is not None
    quoted = [ColumnGroup(heading=reference.label, columns=("speedup",), quoted=True)] if workload else []
    published = {"generation": workload.generation_speedup, "step": workload.step_speedup} if workload else {}
    rows = []
    for label, name, estimate in (
        ("generation", "generation", comparison.generation),
        ("generation, per generated token", "", comparison.generation_per_token),
        ("whole step", "step", comparison.step),
    ):
        cells = [speedup(estimate.value), interval(estimate)]
        if workload is not None:
            cells.append(speedup(published[name]) if name else "")
        rows.append(Row(label=label, cells=tuple(cells)))
    groups = (ColumnGroup(heading="this run, measured", columns=("speedup", "95 % interval")), *quoted)
    return Table(label="speedup of", groups=groups, rows=tuple(rows))


def sweep_table(record: RunRecord) -> Table:
    """Every configuration that tuning tried, the losing ones too."""
    columns = ("batch", "generation s", "p10 to p90", "repeats", "k = 0, s", "speedup", "AL", "verdict")
    points = sorted(record.tuning.points, key=lambda point: (point.batch, point.k))
    rows = tuple(_sweep_row(point, record.tuning.chosen_k) for point in points)
    return Table(label="k", groups=(ColumnGroup(heading="this run, measured", columns=columns),), rows=rows)


def accuracy_table(record: RunRecord) -> Table:
    """Accuracy before and after, with everything that qualifies it."""
    columns = ("avg@k", "95 % interval", "maj@k", "k", "problems", "truncated", "time-outs", "prompts")
    rows = tuple(
        Row(
            label=POLICY_LABELS[e.policy],
            cells=(
                f"{e.avg_at_k:.3f}",
                f"{e.ci95[0]:.3f} to {e.ci95[1]:.3f}",
                f"{e.maj_at_k:.3f}",
                str(e.k),
                str(e.num_problems),
                percent(e.truncated_fraction),
                str(e.num_timeouts),
                e.prompt_hash,
            ),
        )
        for e in record.evaluations
    )
    return Table(label="policy", groups=(ColumnGroup(heading="", columns=columns),), rows=rows)


def count_table(run: RunSummary) -> Table:
    """What was lost or taught nothing, counted."""
    labels = {
        "steps": lambda arm: count(arm.num_steps),
        "rollouts": lambda arm: count(arm.num_rollouts),
        "response tokens": lambda arm: count(arm.num_response_tokens),
        "generated tokens a second": lambda arm: count(round(arm.generation_tokens_per_s)),
        "truncated rollouts": lambda arm: f"{arm.num_truncated} ({percent(arm.num_truncated / arm.num_rollouts)})",
        "reward time-outs (scored 0)": lambda arm: str(arm.num_reward_timeouts),
        "zero-signal groups": lambda arm: str(arm.num_zero_signal_groups),
        "reward, first quarter": lambda arm: f"{arm.reward_first_quarter:.3f}",
        "reward, last quarter": lambda arm: f"{arm.reward_last_quarter:.3f}",
    }
    if any(arm.engine_idle_fraction > 0 for arm in run.arms):  # of several engines: a single one has no such time
        labels["engines idle during generation"] = lambda arm: percent(arm.engine_idle_fraction)
    rows = tuple(Row(label=label, cells=tuple(value(arm) for arm in run.arms)) for label, value in labels.items())
    groups = (ColumnGroup(heading="", columns=tuple(arm.arm.value for arm in run.arms)),)
    return Table(label="over all steps", groups=groups, rows=rows)


def data_table(record: RunRecord) -> Table:
    """Rows read and kept of each data set, and why the others went."""
    columns = ("source", "read", "kept", "duplicate", "conflicting", "unparseable", "too long", "held out", "empty")
    rows = tuple(
        Row(
            label=d.name,
            cells=(
                d.source,
                *map(count, (d.num_read, d.num_kept, d.num_duplicates, d.num_conflicting)),
                *map(count, (d.num_unparseable, d.num_too_long, d.num_held_out, d.num_empty)),
            ),
        )
        for d in record.data
    )
    return Table(label="data set", groups=(ColumnGroup(heading="", columns=columns),), rows=rows)


def draft_table(record: RunRecord) -> Table:
    """The draft's held-out acceptance, position by position."""
    rates = record.draft.heldout_rate_by_position
    joint, rows = 1.0, []
    for position, rate in enumerate(rates, start=1):
        joint *= rate
        rows.append(Row(label=str(position), cells=(percent(rate), percent(joint))))
    columns = ("accepted, given those before", "accepted")
    return Table(label="draft position", groups=(ColumnGroup(heading="held out", columns=columns),), rows=tuple(rows))


def quoted_lengths_table(workload: WorkloadReference, reference: Reference) -> Table:
    """What the reference measured with other draft lengths."""
    rows = tuple(
        Row(label=str(length.k), cells=(f"{length.mean_acceptance_length:.2f}", speedup(length.generation_speedup)))
        for length in workload.draft_lengths
    )
    group = ColumnGroup(heading=reference.label, columns=("AL", "generation speedup"), quoted=True)
    return Table(label="k", groups=(group,), rows=rows)


def quoted_drafts_table(workload: WorkloadReference, reference: Reference) -> Table:
    """What the reference measured with other drafts."""
    rows = tuple(
        Row(label=d.draft, cells=(f"{d.mean_acceptance_length:.2f}", speedup(d.generation_speedup)))
        for d in workload.drafts
    )
    group = ColumnGroup(heading=reference.label, columns=("AL", "generation speedup"), quoted=True)
    return Table(label=f"draft, k = {workload.num_speculative_tokens}", groups=(group,), rows=rows)


def _step_row(run: RunSummary, workload: WorkloadReference | None, stage: str | None) -> Row:
    times = [arm.stages[stage] if stage else arm.step for arm in run.arms]
    cells = [
        cell
        for arm, time in zip(run.arms, times, strict=True)
        for cell in (("left out", "", "") if stage in arm.left_out else _time_cells(arm, time))
    ]
    cells.append(speedup(times[0].median / times[1].median) if len(times) == 2 and times[1].median > 0 else "")
    if workload is not None:
        base, spec = (
            workload.times(arm).by_stage()[stage] if stage else workload.times(arm).step_s
            for arm in (Arm.AUTOREGRESSIVE, Arm.SPECULATIVE)
        )
        cells += [f"{base:.1f}", f"{spec:.1f}", speedup(base / spec)]
    label = STAGE_LABELS[stage] if stage else "step (wall time)"
    return Row(label=label, cells=tuple(cells), kind="" if stage else "total")


def _time_cells(arm: ArmSummary, time: Spread) -> Sequence[str]:
    return seconds(time.median), f"{seconds(time.p10)} to {seconds(time.p90)}", percent(time.median / arm.step.median)


def _sweep_row(point: SweepPoint, chosen_k: int) -> Row:
    loses = point.k > 0 and point.speedup < 1
    chosen = point.k == chosen_k
    verdict = "baseline" if point.k == 0 else "loses" if loses else "wins"
    kinds = [("baseline", point.k == 0), ("loses", loses), ("chosen", chosen)]
    cells = (
        str(point.batch),
        seconds(point.generation_s),
        f"{seconds(point.generation_p10_s)} to {seconds(point.generation_p90_s)}",
        str(point.num_repeats),
        seconds(point.autoregressive_s),
        speedup(point.speedup),
        f"{point.mean_acceptance_length:.2f}",
        f"{verdict}, chosen" if chosen else verdict,
    )
    return Row(label=str(point.k), cells=cells, kind=" ".join(kind for kind, holds in kinds if holds))


def certificate_table(certificate: CertificateRecord) -> Table:
    """Every test of the losslessness certificate, and the control's beside it."""
    control = {finding.name: finding for finding in certificate.control}
    rows = tuple(
        Row(
            label=finding.name,
            cells=(
                count(finding.num_observations),
                f"{finding.statistic:.3g}",
                f"{finding.p_value:.2g}",
                f"{finding.p_value_corrected:.2g}",
                "rejects" if finding.reject else "passes",
                f"{control[finding.name].p_value:.2g}" if finding.name in control else "",
            ),
            kind="loses" if finding.reject else "",
        )
        for finding in certificate.findings
    )
    columns = ("observations", "statistic", "p", "p, Holm", "verdict")
    groups = (
        ColumnGroup(heading="speculative engine", columns=columns),
        ColumnGroup(heading="autoregressive, as control", columns=("p",)),
    )
    return Table(label="test", groups=groups, rows=rows)
