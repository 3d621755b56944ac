"""Tables of the report page and of `simulate` as plain cells. A column is measured, projected or quoted, never two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.records.run import DriftRecord, RunRecord
from slipstream.records.stages import CertificateRecord, DraftRecord, SamplingPoint, SweepPoint, TuningRecord
from slipstream.records.steps import DynamicSampling
from slipstream.report.formats import (
    KINDS,
    POLICY_LABELS,
    STAGE_LABELS,
    count,
    percent,
    seconds,
    seconds_band,
    speedup,
    with_interval,
)
from slipstream.report.results import speedups
from slipstream.report.summary import ArmSummary, LoopComparison, RunSummary, accuracy_curves
from slipstream.simulator.balance import AsynchronousPrediction, BalanceRecord
from slipstream.simulator.observed import CheckRecord
from slipstream.simulator.projection import ProjectedPoint
from slipstream.simulator.reference import DraftReference, WorkloadReference, read_reference
from slipstream.statistics import Spread
from slipstream.workers.placement.plan import table


class Row(NamedTuple):
    """One row: a label, then the cells of all groups."""

    label: str
    cells: tuple[str, ...]
    kind: str = ""  # CSS classes: "total", "baseline", "loses", "chosen"


@dataclass(frozen=True, slots=True)
class Table:
    """A table; each row has one cell for every column."""

    label: str
    groups: Mapping[str, Sequence[str]]  # columns by the heading over them
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        assert all(len(row.cells) == len(self.are_quoted) for row in self.rows), self.label

    @property
    def are_quoted(self) -> tuple[bool, ...]:
        """One flag a column, True where the column stands under the publication's label."""
        quoted = read_reference().label
        return tuple(heading == quoted for heading, columns in self.groups.items() for _ in columns)


def table_text(shown: Table) -> str:
    """Render a table as plain text; the heading over columns stands before the first of them."""
    headings = [shown.label]
    for group, (first, *others) in shown.groups.items():
        headings += [f"{group}: {first}" if group else first, *others]
    return table([headings, *([row.label, *row.cells] for row in shown.rows)])


def step_table(run: RunSummary, workload: WorkloadReference | None) -> Table:
    """Tabulate the seconds of each stage in both arms, their ratio, and the published values."""
    groups = {arm.arm.value: ("median s", "p10 to p90", "share") for arm in run.arms}
    groups |= {"": ("ratio",)} if run.comparison else {}
    if workload is not None:
        groups[read_reference().label] = ("AR s", "spec s", "ratio")
    return Table("stage", groups, [_step_row(run, workload, stage) for stage in STAGE_LABELS])


def _step_row(run: RunSummary, workload: WorkloadReference | None, stage: str) -> Row:
    """Build the row of one stage; an empty name is the whole step."""
    cells: list[str] = []
    times = [arm.stages.get(stage, arm.step) for arm in run.arms]
    for arm, time in zip(run.arms, times, strict=True):
        timed = (seconds(time.median), seconds_band(time.p10, time.p90), percent(time.median / arm.step.median))
        cells += ("left out", "", "") if stage in arm.left_out else timed
    if run.comparison is not None:
        cells.append(speedup(times[0].median / times[1].median) if times[1].median > 0 else "")
    if workload is not None:
        arms = (workload.autoregressive, workload.speculative)
        base, spec = (each.by_stage().get(stage, each.step_s) for each in arms)
        cells += [f"{base:.1f}", f"{spec:.1f}", speedup(base / spec)]
    return Row(STAGE_LABELS[stage], tuple(cells), "" if stage else "total")


def speedup_table(run: RunSummary, workload: WorkloadReference | None) -> Table:
    """Tabulate the speedups with their intervals and verdicts, beside the published ones."""
    groups: dict[str, tuple[str, ...]] = {"this run, measured": ("ratio", "95 % interval", "verdict")}
    published: dict[str, float] = {}
    if workload is not None:
        groups[read_reference().label] = ("ratio",)
        published = {"generation_speedup": workload.generation_speedup, "step_speedup": workload.step_speedup}
    rows = []
    for each in speedups(run):
        quoted = [speedup(published[each.name]) if each.name in published else ""] if published else []
        rows.append(Row(each.label.strip(), (each.text, each.uncertainty, each.verdict, *quoted)))
    return Table("of both arms", groups, rows)


def sweep_table(tuning: TuningRecord) -> Table:
    """Tabulate every draft length that tuning measured."""
    columns = ("batch", "generation s", "p10 to p90", "repeats", "k = 0, s", "speedup", "AL", "choice")
    rows = []
    for point in sorted(tuning.points, key=lambda point: (point.batch, point.k)):
        choice = ["baseline"] if point.k == 0 else []
        choice += ["chosen"] if point.k == tuning.chosen_k else []
        slower = ["loses"] if point.k and point.speedup < 1 else []
        compared = seconds(point.autoregressive_s), speedup(point.speedup), f"{point.mean_acceptance_length:.2f}"
        cells = (*_timed(point), *compared, ", ".join(choice))
        rows.append(Row(str(point.k), cells, " ".join([*slower, *choice])))
    return Table("k", {"this run, measured": columns}, rows)


def sampling_table(tuning: TuningRecord) -> Table:
    """Tabulate both kinds of drafts at the chosen k."""
    columns = ("batch", "generation s", "p10 to p90", "repeats", "AL", "speedup", "choice")
    rows = []
    for point in tuning.samplings:
        choice = "chosen" if point.sampling == tuning.sampling else ""
        compared = f"{point.mean_acceptance_length:.2f}", speedup(point.gain), choice
        rows.append(Row(point.sampling, (*_timed(point), *compared), choice))
    return Table("drafts", {f"k = {tuning.chosen_k}, against probabilistic drafts, measured": columns}, rows)


def _timed(point: SweepPoint | SamplingPoint) -> tuple[str, ...]:
    """Batch, generation time, its band, and number of rounds."""
    band = seconds_band(point.generation_p10_s, point.generation_p90_s)
    return str(point.batch), seconds(point.generation_s), band, str(point.num_repeats)


def running_table(tuning: TuningRecord) -> Table:
    """Tabulate the speedup of every k at every running batch, and the schedule's choice."""
    kinds = sorted({(point.k, point.is_switched_off) for point in tuning.running})
    known = {(point.batch_from, point.k, point.is_switched_off): point.speedup for point in tuning.running}
    rows = []
    for start, end in sorted({(point.batch_from, point.batch_to) for point in tuning.running}):
        chosen = next(e.num_speculative_tokens for e in tuning.schedule if e.batch_from <= start <= e.batch_to)
        speedups = [known.get((start, *kind)) for kind in kinds]
        cells = ("" if value is None else speedup(value) for value in speedups)
        label = str(start) if start == end else f"{start} to {end}"
        rows.append(Row(label, (*cells, f"k = {chosen}"), "" if chosen == tuning.chosen_k else "chosen"))
    columns = ["drafts switched off" if is_off else f"k = {k}" for k, is_off in kinds]
    return Table("running batch", {"speedup over k = 0, measured": columns, "": ("schedule",)}, rows)


def accuracy_table(record: RunRecord) -> Table:
    """Tabulate accuracy before, during and after RL, with sample sizes and losses."""
    columns = ("avg@k", "95 % interval", "maj@k", "k", "problems", "truncated", "time-outs", "prompts")
    curves, rows = accuracy_curves(record), []
    for last in record.evaluations:
        of_arm = {step: each for step, each in curves.get(last.policy, {}).items() if each.policy == last.policy}
        for step, e in (of_arm or {0: last}).items():
            label = POLICY_LABELS[e.policy] + ("" if e is last else f", after step {step}")
            accuracy = f"{e.avg_at_k:.3f}", f"{e.ci95[0]:.3f} to {e.ci95[1]:.3f}" if e.ci95 else "none"
            problems = (f"{e.maj_at_k:.3f}", str(e.k), str(e.num_problems), percent(e.truncated_fraction))
            rows.append(Row(label, (*accuracy, *problems, str(e.num_timeouts), e.prompt_hash)))
    return Table("policy", {"": columns}, rows)


def count_table(run: RunSummary) -> Table:
    """Tabulate counts of rollouts, tokens and losses of each arm."""
    labels = {
        "steps": lambda arm: count(arm.num_steps),
        "rollouts": lambda arm: count(arm.counts["num_rollouts"]),
        "response tokens": lambda arm: count(arm.counts["num_response_tokens"]),
        "generated tokens a second": lambda arm: count(round(arm.generation_tokens_per_s)),
        "truncated rollouts": _truncated,
        "reward time-outs (scored 0)": lambda arm: str(arm.counts["num_reward_timeouts"]),
        "zero-signal groups": lambda arm: str(arm.counts["num_zero_signal_groups"]),
        "reward, first quarter": lambda arm: with_interval(arm.reward_first, "reward"),
        "reward, last quarter": lambda arm: with_interval(arm.reward_last, "reward"),
    }
    if any(arm.counts["num_preemptions"] for arm in run.arms):  # a cache that is large enough preempts nothing
        labels["preempted rollouts (KV cache full)"] = lambda arm: count(arm.counts["num_preemptions"])
    if any(arm.counts["num_filtered"] for arm in run.arms):
        labels["rollouts left out of the loss (cut off)"] = lambda arm: count(arm.counts["num_filtered"])
    if any(arm.engine_idle_fraction > 0 for arm in run.arms):  # a single engine is never idle during generation
        labels["engines idle during generation"] = lambda arm: percent(arm.engine_idle_fraction)
    rows = [Row(label, tuple(value(arm) for arm in run.arms)) for label, value in labels.items()]
    sampling = [arm.sampling for arm in run.arms if arm.sampling is not None]
    rows += _sampling_rows(sampling) if len(sampling) == len(run.arms) else []
    return Table("over all steps", {"": [arm.arm.value for arm in run.arms]}, rows)


def _truncated(arm: ArmSummary) -> str:
    number = arm.counts["num_truncated"]
    return f"{number} ({percent(number / arm.counts['num_rollouts'])})"


def _sampling_rows(arms: Sequence[DynamicSampling]) -> list[Row]:
    """Rows about further batches of prompts, where a recipe asks for them in place of groups without signal."""
    labels = {
        "batches of prompts sampled": lambda each: count(each.num_batches),
        "groups sampled": lambda each: count(each.num_groups),
        "groups with signal": lambda each: count(each.num_with_signal),
        "groups trained on": lambda each: count(each.num_trained),
        "groups without signal trained on": lambda each: count(each.num_filled),
        "groups with signal left out": lambda each: count(each.num_surplus),
        "generation of further batches": lambda each: f"{each.extra_generation_s:.1f} s",
    }
    return [Row(label, tuple(value(each) for each in arms)) for label, value in labels.items()]


def data_table(record: RunRecord) -> Table:
    """Tabulate the rows read, kept and dropped of each data set."""
    lost = ("duplicate", "conflicting", "unparseable", "too long", "held out", "empty", "over weight")
    rows = []
    for d in record.data:
        numbers = (d.num_read, d.num_kept, d.num_duplicates, d.num_conflicting, d.num_unparseable, d.num_too_long)
        rows.append(Row(d.name, (d.source, *map(count, (*numbers, d.num_held_out, d.num_empty, d.num_left_out)))))
    return Table("data set", {"": ("source", "read", "kept", *lost)}, rows)


def draft_table(draft: DraftRecord) -> Table:
    """Tabulate the draft's held-out acceptance by position."""
    rates = draft.heldout_rate_by_position
    both = enumerate(zip(rates, np.cumprod(rates).tolist(), strict=True), start=1)
    rows = [Row(str(position), (percent(rate), percent(joint))) for position, (rate, joint) in both]
    return Table("draft position", {"held out": ("accepted, given those before", "accepted")}, rows)


def quoted_table(label: str, published: Mapping[int, DraftReference] | Mapping[str, DraftReference]) -> Table:
    """Tabulate published measurements by draft length or by kind of draft."""
    rows = [
        Row(str(name), (f"{each.mean_acceptance_length:.2f}", speedup(each.generation_speedup)))
        for name, each in published.items()
    ]
    return Table(label, {read_reference().label: ("AL", "generation speedup")}, rows)


def certificate_table(certificate: CertificateRecord) -> Table:
    """Tabulate the tests of the losslessness certificate with the control's p-values."""
    control = {finding.name: f"{finding.p_value:.2g}" for finding in certificate.control}
    rows = []
    for each in certificate.findings:
        figures = (f"{each.statistic:.3g}", f"{each.p_value:.2g}", f"{each.p_value_corrected:.2g}")
        verdict, kind = ("rejects", "loses") if each.reject else ("passes", "")
        cells = (count(each.num_observations), *figures, verdict, control.get(each.name, ""))
        rows.append(Row(each.name, cells, kind))
    columns = ("observations", "statistic", "p", "p, Holm", "verdict")
    return Table("test", {"speculative engine": columns, "autoregressive, as control": ("p",)}, rows)


def position_table(certificate: CertificateRecord) -> Table:
    """Tabulate the acceptance length by position in the sequence."""
    rows = [Row(positions, (f"{length:.2f}",)) for positions, length in certificate.lengths_by_position.items()]
    return Table("position in the sequence", {"": ("mean acceptance length",)}, rows)


def drift_table(drift: DriftRecord) -> Table:
    """Tabulate each judged result with its band and verdict."""

    def number(value: float) -> str:
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"

    rows = []
    for each in drift.findings:
        band = " to ".join(map(number, each.band or ()))
        cells = (number(each.value), band, str(each.num_executions), each.verdict)
        rows.append(Row(KINDS[each.name].label, cells, "loses" if each in drift.outside else ""))
    return Table("result", {"": ("this execution", "band", "executions before", "verdict")}, rows)


def loop_table(compared: LoopComparison) -> Table:
    """Tabulate step times and speedups of all arms, with exposed, hidden and idle shares."""
    has_baseline = any(arm.over_baseline is not None for arm in compared.arms)
    groups = {
        "step": ("median s", "p10 to p90"),
        "step speedup over": (*(["the baseline"] if has_baseline else []), "the same arm in turn"),
        "generation": ("exposed s", "hidden s"),
        "idle": ("engines", "learner"),
        "scores and new weights": ("exposed", "hidden"),
    }
    rows = []
    for arm in compared.arms:
        hidden = "" if arm.is_synchronous else seconds(arm.hidden_s)
        ratios = [arm.over_baseline, arm.over_synchronous] if has_baseline else [arm.over_synchronous]
        shown = ("" if ratio is None else with_interval(ratio) for ratio in ratios)
        step = (seconds(arm.step.median), seconds_band(arm.step.p10, arm.step.p90), *shown)
        idle = (percent(arm.engine_idle_fraction), percent(arm.learner_idle_fraction))
        joining = ("" if x is None else percent(x) for x in (arm.exposed_joining_fraction, arm.hidden_joining_fraction))
        kind = "baseline" if has_baseline and arm.over_baseline is None else ""
        rows.append(Row(POLICY_LABELS[arm.name], (*step, seconds(arm.exposed_s), hidden, *idle, *joining), kind))
    return Table("arm", groups, rows)


def lag_table(compared: LoopComparison) -> Table:
    """Tabulate the tokens that asynchronous arms train on by lag, with their importance ratios."""
    columns = ("tokens", "share", "ratio, mean", "ratio, largest", "weights changed", "effective sample size")
    rows = []
    for arm in compared.asynchronous:
        total = sum(lag.num_tokens for lag in arm.lags)
        for lag in arm.lags:
            tokens = (count(lag.num_tokens), percent(lag.num_tokens / total))
            ratios = (f"{lag.ratio_mean:.3f}", f"{lag.ratio_max:.2f}", percent(lag.clipped_fraction))
            cells = (*tokens, *ratios, percent(lag.effective_sample_size))
            rows.append(Row(f"{arm.arm.value}, {lag.lag}", cells))
    return Table("arm, lag", {"": columns}, rows)


def loop_learning_table(compared: LoopComparison) -> Table:
    """Tabulate reward and rollout losses of all arms."""
    groups = {
        "reward": ("first quarter", "last quarter", "gain", "of gain in turn"),
        "rollouts": ("waited for", "begun anew", "lost"),
    }
    rows = []
    in_turn = {arm.arm: arm.reward_gain for arm in compared.arms if arm.is_synchronous}
    for arm in compared.arms:
        gain, share, lost = in_turn[arm.arm], "", ("", "", "")
        if not arm.is_synchronous:
            share = f"{arm.reward_gain / gain:.2f}" if gain > 0 else ""
            lost = tuple(map(str, (arm.num_awaited, arm.num_restarted, arm.num_regenerated)))
        rewards = (with_interval(arm.reward_first, "reward"), with_interval(arm.reward_last, "reward"))
        learned = (*rewards, f"{arm.reward_gain:+.3f}", share)
        rows.append(Row(POLICY_LABELS[arm.name], (*learned, *lost)))
    return Table("arm", groups, rows)


def prediction_table(prediction: AsynchronousPrediction, compared: LoopComparison) -> Table:
    """Tabulate each asynchronous arm's mean step, exposed and hidden generation, measured and predicted."""
    groups = {
        "measured": ("step s", "exposed s", "hidden s"),
        "projected": ("step s", "p10 to p90", "exposed s", "hidden s", "step's error"),
    }
    found = {arm.arm: arm for arm in prediction.arms}
    rows = []
    for arm in compared.asynchronous:
        each = found[arm.arm]
        measured = map(seconds, (arm.step_s, arm.exposed_s, arm.hidden_s))
        band = seconds_band(each.step_p10_s, each.step_p90_s)
        projected = (seconds(each.step_s), band, seconds(each.exposed_s), seconds(each.hidden_s))
        rows.append(Row(POLICY_LABELS[arm.name], (*measured, *projected, f"{each.step_s / arm.step_s - 1:+.0%}")))
    return Table("mean step", groups, rows)


def split_table(found: BalanceRecord) -> Table:
    """Tabulate each arm's projected step on every split of a run's machine."""
    best = [found.best(arm) for arm in dict.fromkeys(row.arm for row in found.rows)]
    by_split: dict[str, list[str]] = {}
    for row in found.rows:
        bound = f"{row.bound}, fastest" if row in best else row.bound.value
        cells = by_split.setdefault(f"{row.generation} + {row.training}", [])
        cells += [seconds(row.step_s), seconds(row.exposed_s), bound]
    groups = {f"{row.arm.value}, projected": ("step s", "exposed s", "bound by") for row in best}
    rows = [Row(split, tuple(cells)) for split, cells in by_split.items()]
    return Table(f"{found.unit}s that generate + train", groups, rows)


def check_table(check: CheckRecord) -> Table:
    """Compare the projected with the measured speculative arm, which the calibration did not use."""
    groups = {"measured": ("generation s",), "projected": ("generation s", "p10 to p90", "error")}
    band = seconds_band(check.predicted_p10_s, check.predicted_p90_s)
    error = f"{check.predicted_s / check.measured_s - 1:+.1%}"
    cells = (seconds(check.measured_s), seconds(check.predicted_s), band, error)
    return Table("speculative arm", groups, [Row(f"k = {check.k}", cells)])


def lengths_table(points: Sequence[ProjectedPoint], label: str) -> Table:
    """Tabulate projections of other draft lengths."""
    rows = []
    for each in points:
        cells = (f"{each.acceptance_length:.2f}", _band(each.rollout_speedup), _band(each.step_speedup))
        rows.append(Row(f"k = {each.k}", cells))
    speedups = ("generation speedup", "step speedup")
    return Table(label, {"assumed": ("acceptance length",), "projected, p10 to p90": speedups}, rows)


def _band(band: Spread) -> str:
    return f"{speedup(band.median)} ({band.p10:.2f} to {band.p90:.2f})"
