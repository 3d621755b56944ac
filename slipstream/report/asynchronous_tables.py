"""The tables of the page's section on the asynchronous arms, of what was measured."""

from __future__ import annotations

from slipstream.records.stages import EvaluationRecord
from slipstream.records.steps import LagStats
from slipstream.report.asynchronous_arms import LoopArm, LoopComparison
from slipstream.report.formats import POLICY_LABELS, count, percent, seconds, speedup_with_interval
from slipstream.report.tables import ColumnGroup, Row, Table
from slipstream.statistics import Estimate


def loop_table(compared: LoopComparison) -> Table:
    """Where a step's time goes in every arm, and how much faster it is."""
    groups = (
        ColumnGroup(heading="step", columns=("median s", "p10 to p90")),
        ColumnGroup(heading="step speedup over", columns=("the baseline", "the same arm in turn")),
        ColumnGroup(heading="generation", columns=("exposed s", "hidden s")),
        ColumnGroup(heading="idle", columns=("engines", "learner")),
        ColumnGroup(heading="scores and new weights", columns=("exposed", "hidden")),
    )
    return Table(label="arm", groups=groups, rows=tuple(_loop_row(arm) for arm in compared.arms))


def lag_table(compared: LoopComparison) -> Table:
    """The tokens that the asynchronous arms were trained on, by how far they lag, and how they were corrected."""
    columns = ("tokens", "share", "ratio, mean", "ratio, largest", "weights changed", "effective sample size")
    rows = tuple(
        _lag_row(arm, lag, sum(each.num_tokens for each in arm.lags))
        for arm in compared.asynchronous
        for lag in arm.lags
    )
    return Table(label="arm, lag", groups=(ColumnGroup(heading="", columns=columns),), rows=rows)


def loop_learning_table(compared: LoopComparison, evaluations: tuple[EvaluationRecord, ...]) -> Table:
    """Reward and accuracy of all arms, and what became of rollouts in the asynchronous ones."""
    accuracies = {evaluation.policy: evaluation for evaluation in evaluations}
    groups = (
        ColumnGroup(heading="reward", columns=("first quarter", "last quarter", "gain", "of gain in turn")),
        ColumnGroup(heading="AIME-2024-like", columns=("avg@k", "95 % interval")),
        ColumnGroup(heading="rollouts", columns=("waited for", "begun anew", "lost")),
    )
    rows = tuple(_learning_row(arm, compared, accuracies.get(arm.name)) for arm in compared.arms)
    return Table(label="arm", groups=groups, rows=rows)


def _loop_row(arm: LoopArm) -> Row:
    cells = (
        seconds(arm.step.median),
        f"{seconds(arm.step.p10)} to {seconds(arm.step.p90)}",
        _ratio(arm.over_baseline),
        _ratio(arm.over_synchronous),
        seconds(arm.exposed_s),
        "" if arm.is_synchronous else seconds(arm.hidden_s),
        percent(arm.engine_idle_fraction),
        percent(arm.learner_idle_fraction),
        "" if arm.exposed_joining_fraction is None else percent(arm.exposed_joining_fraction),
        "" if arm.hidden_joining_fraction is None else percent(arm.hidden_joining_fraction),
    )
    return Row(label=_label(arm), cells=cells, kind="baseline" if arm.over_baseline is None else "")


def _lag_row(arm: LoopArm, lag: LagStats, num_tokens: int) -> Row:
    cells = (
        count(lag.num_tokens),
        percent(lag.num_tokens / num_tokens),
        f"{lag.ratio_mean:.3f}",
        f"{lag.ratio_max:.2f}",
        percent(lag.clipped_fraction),
        percent(lag.effective_sample_size),
    )
    return Row(label=f"{arm.arm.value}, {lag.lag}", cells=cells)


def _learning_row(arm: LoopArm, compared: LoopComparison, evaluation: EvaluationRecord | None) -> Row:
    gain = compared.synchronous(arm.arm).reward_gain
    cells = (
        f"{arm.reward_first_quarter:.3f}",
        f"{arm.reward_last_quarter:.3f}",
        f"{arm.reward_gain:+.3f}",
        f"{arm.reward_gain / gain:.2f}" if not arm.is_synchronous and gain > 0 else "",
        "" if evaluation is None else f"{evaluation.avg_at_k:.3f}",
        "" if evaluation is None else f"{evaluation.ci95[0]:.3f} to {evaluation.ci95[1]:.3f}",
        "" if arm.is_synchronous else str(arm.num_awaited),
        "" if arm.is_synchronous else str(arm.num_restarted),
        "" if arm.is_synchronous else str(arm.num_regenerated),
    )
    return Row(label=_label(arm), cells=cells)


def _label(arm: LoopArm) -> str:
    """`speculative, asynchronous`."""
    return POLICY_LABELS[arm.name]


def _ratio(estimate: Estimate | None) -> str:
    return "" if estimate is None else speedup_with_interval(estimate)
