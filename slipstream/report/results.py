"""Results of a run, each defined once, and their renderings: MLflow metrics and description, and terminal table."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from slipstream.losslessness.verdict import LOSSLESS
from slipstream.records.run import RunRecord
from slipstream.records.stages import CertificateRecord
from slipstream.records.steps import EvaluationRecord
from slipstream.report.claims import claim
from slipstream.report.formats import (
    KINDS,
    POLICY_LABELS,
    STAGE_LABELS,
    UNITS,
    interval,
    metrics_with_ends,
    percent,
    seconds,
    speedup,
    with_interval,
)
from slipstream.report.sentences import findings, verdict
from slipstream.report.summary import (
    ArmSummary,
    LoopArm,
    LoopComparison,
    RunSummary,
    accuracy_curves,
    compare_loops,
    summarise_arms,
)
from slipstream.statistics import Estimate

VERDICT_TAG = "verdict"
_LABEL_WIDTH = 36
_COLUMN_WIDTH = 16
_WIDTH = _LABEL_WIDTH + 4 * _COLUMN_WIDTH


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a run."""

    name: str  # metric without `result/`; empty: the result is shown but is no metric
    label: str  # empty: the result is a metric but is not shown
    unit: str  # a key of `UNITS`
    estimate: Estimate
    note: str  # qualifies the value, or says why it has no interval
    verdict: str  # `ClaimKind` of the value; empty where there is no verdict

    @property
    def text(self) -> str:
        """The formatted value."""
        return UNITS[self.unit].format(self.estimate.value)

    @property
    def uncertainty(self) -> str:
        """The formatted interval, or the note where there is none."""
        if self.estimate.ci95 is None:
            return self.note
        return " to ".join(UNITS[self.unit].format(end).rstrip("x") for end in self.estimate.ci95)


def results(record: RunRecord) -> list[Result]:
    """Return every result of a run; results whose data are missing (an arm, enough timed steps) are left out."""
    run, compared = summarise_arms(record.arms), compare_loops(record)
    k = run.speculative.k if run.speculative else 0
    found = speedups(run)
    if run.acceptance is None and record.tuning is not None:
        found.append(_result("mean_acceptance_length", 1.0, note=f"nothing was drafted: {record.tuning.reason}"))
    if run.acceptance is not None:
        by_position = " ".join(percent(rate) for rate in run.acceptance.rate_by_position)
        note = f"of at most {k + 1} (k = {k}); by position {by_position}"
        found.append(_result("mean_acceptance_length", run.acceptance.mean_acceptance_length, note=note))
    if run.comparison is not None:
        difference = run.comparison.reward_difference
        note = "" if difference.ci95 else "no interval: few steps, or all alike"
        found.append(_result("reward_difference", difference, note=note))
    for arm in run.arms:
        found += [_reward(arm.arm.value, arm), _gain(arm, is_shown=run.alone is not None)]
    for arm in compared.asynchronous:
        if arm.over_baseline is not None:
            label = f"step speedup over the baseline, {POLICY_LABELS[arm.name]}"
            found.append(_result("", arm.over_baseline, label=label, verdict=_overlapping_verdict(arm.over_baseline)))
        found.append(_reward(arm.name, arm))
    for e in record.evaluations:
        found.append(_result(f"validation_{e.policy}", _avg_at_k(e), note=f"avg@{e.k} of {e.num_problems} problems"))
    metrics: dict[str, float | Estimate] = {f"tokens_per_s_{arm.arm}": arm.generation_tokens_per_s for arm in run.arms}
    metrics |= {"num_speculative_tokens": float(k), **_asynchronous_metrics(compared)}
    metrics |= {"paired": float(run.comparison.paired)} if run.comparison is not None else {}
    return found + [_result(name, value, label="") for name, value in metrics.items()]


def speedups(run: RunSummary) -> list[Result]:
    """Return the speedups of the synchronous speculative arm; empty with one arm."""
    compared = run.comparison
    if compared is None:
        return []
    generation, step, claims = compared.generation, compared.step, compared.claims
    return [
        _result("generation_speedup", generation, verdict=claims["generation"].kind),
        _result("", compared.generation_per_token, label="  the same per generated token"),
        _result("step_speedup", step, verdict=claims["step"].kind),
        _result("", compared.step_bound, label="  bound, drafting for free", note="1 / (g / AL + 1 - g)"),
        *([] if compared.control is None else [_result("control_ratio", compared.control)]),
    ]


def result_metrics(record: RunRecord, *, hours: float, gpu_hours: float) -> dict[str, float]:
    """Return all `result/…` metrics of the run, with the given durations."""
    metrics = {"result/hours": hours, "result/gpu_hours": gpu_hours}
    for each in results(record):
        if each.name:
            metrics |= metrics_with_ends(f"result/{each.name}", each.estimate)
    return metrics | ({} if record.certificate is None else certificate_metrics(record.certificate))


def verdict_tags(record: RunRecord) -> dict[str, str]:
    """Tag with the verdict, and `verdict.step` and `verdict.generation` with its kinds, to filter executions by."""
    run = summarise_arms(record.arms)
    claims = {} if run.comparison is None else run.comparison.claims
    return {VERDICT_TAG: verdict(record), **{f"{VERDICT_TAG}.{name}": each.kind for name, each in claims.items()}}


def curve_metrics(record: RunRecord) -> list[tuple[int, dict[str, float]]]:
    """Accuracy metrics of each arm's curve, each with its step."""
    return [
        (step, metrics_with_ends(f"validation/{name}", _avg_at_k(evaluation)))
        for name, curve in accuracy_curves(record).items()
        for step, evaluation in curve.items()
    ]


def certificate_metrics(certificate: CertificateRecord) -> dict[str, float]:
    """Metric `result/lossless`: 1 if the certificate's verdict is lossless, else 0."""
    return {"result/lossless": float(certificate.verdict == LOSSLESS)}


def description(record: RunRecord, *, execution_url: str = "") -> str:
    """Render the description of the execution's MLflow run in Markdown: the verdict and a table of results."""
    rows = [("figure", "value", "95 % interval, or what it is"), ("---", "---", "---")]
    shown = [each for each in results(record) if each.label]
    rows += [(e.label.strip(), e.text, ", ".join(filter(None, dict.fromkeys((e.uncertainty, e.note))))) for e in shown]
    rows += [] if record.certificate is None else [("losslessness", record.certificate.verdict, "")]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    parts = [verdict(record), table, "The whole report is the artifact `report.html`."]
    return "\n\n".join([*parts, f"[The execution in Flyte]({execution_url})"] if execution_url else parts)


def terminal_table(record: RunRecord) -> str:
    """Render the results as plain text of 100 columns: stage times, results, then a block an asynchronous arm."""
    run, compared = summarise_arms(record.arms), compare_loops(record)
    shown = [each for each in results(record) if each.label and each.name != "reward_difference"]
    blocks = [line for arm in compared.asynchronous for line in _asynchronous_lines(arm, shown)]
    others = tuple(f", {POLICY_LABELS[arm.name]}" for arm in compared.asynchronous)
    ratio = "ratio" if run.comparison else ""
    lines = [_row("median seconds a step", *[arm.arm.value for arm in run.arms], ratio), "-" * _WIDTH]
    lines += [*(_stage_row(run, stage) for stage in STAGE_LABELS), "-" * _WIDTH]
    if run.comparison is not None:
        pairing = ("paired", "") if run.comparison.paired else ("unpaired", "the arms ran one after the other")
        lines.append(_row("arms", *pairing))
    lines += [_result_row(each, each.label) for each in shown if not each.label.endswith(others)]
    if record.certificate is not None:
        weakest = max(power.detectable_total_variation for power in record.certificate.detectable)
        seen = f"a bias above {weakest:.3f} a token would be seen"
        lines.append(_row("losslessness", record.certificate.verdict, seen))
    if record.numerics is not None:
        took = f"{record.numerics.float32_ms:.2f} ms in float32, {record.numerics.bfloat16_ms:.2f} in bfloat16"
        lines.append(_row("computed in", record.numerics.dtype, f"a product takes {took}"))
    if record.logical_gpus:
        lines.append(_row("GPUs", "logical", "only counted; processes may have used CPUs"))
    lines += findings(record)
    lines += ["-" * _WIDTH, *textwrap.wrap(verdict(record), _WIDTH)]
    lines += ["-" * _WIDTH, *blocks] if blocks else []
    return "\n".join(line.rstrip() for line in lines)


def _result(
    name: str,
    value: float | Estimate,
    *,
    label: str | None = None,
    note: str | None = None,
    verdict: str = "",
) -> Result:
    """Build a result from `KINDS`, or a ratio with the given `label`; an estimate without interval says why."""
    estimate = value if isinstance(value, Estimate) else Estimate(value=value, ci95=None)
    if note is None:
        note = interval(estimate) if estimate is value and estimate.ci95 is None else ""
    label, unit = (KINDS[name].label, KINDS[name].unit) if label is None else (label, "x")
    return Result(name, label, unit, estimate, note, verdict)


def _avg_at_k(evaluation: EvaluationRecord) -> Estimate:
    return Estimate(value=evaluation.avg_at_k, ci95=evaluation.ci95)


def _overlapping_verdict(ratio: Estimate) -> str:
    return claim(ratio, None, paired=False, overlaps=True).kind


def _reward(name: str, arm: ArmSummary | LoopArm) -> Result:
    return _result(f"reward_{name}", arm.reward_last, note=f"at first {with_interval(arm.reward_first, 'reward')}")


def _gain(arm: ArmSummary, *, is_shown: bool) -> Result:
    has_interval = arm.reward_gain.ci95 is not None
    note = "the last quarter of the steps minus the first" if has_interval else "no interval: few steps, or all alike"
    return _result(f"reward_gain_{arm.arm}", arm.reward_gain, label=None if is_shown else "", note=note)


def _asynchronous_metrics(compared: LoopComparison) -> dict[str, float | Estimate]:
    """Return the asynchronous arms' metrics that have no row among the results."""
    metrics: dict[str, float | Estimate] = {}
    if compared.speculation is not None:
        metrics["asynchronous_speculation_step_speedup"] = compared.speculation
    for arm in compared.asynchronous:
        assert arm.over_synchronous is not None
        metrics |= {
            f"asynchronous_step_speedup_{arm.arm}": arm.over_synchronous,
            f"exposed_generation_s_{arm.name}": arm.exposed_s,
            f"hidden_generation_s_{arm.name}": arm.hidden_s,
            f"engine_idle_fraction_{arm.name}": arm.engine_idle_fraction,
            f"learner_idle_fraction_{arm.name}": arm.learner_idle_fraction,
            f"mean_lag_{arm.name}": arm.mean_lag,
        }
    return metrics


def _row(label: str, *cells: str) -> str:
    *inner, last = cells
    columns = "".join(cell.rjust(_COLUMN_WIDTH) for cell in inner)
    too_long = max(0, len(label) - _LABEL_WIDTH)  # a long label takes the space before the first column
    return label.ljust(_LABEL_WIDTH) + columns[too_long:] + "  " + last


def _stage_row(run: RunSummary, stage: str) -> str:
    medians = [arm.stages.get(stage, arm.step).median for arm in run.arms]
    ratio = speedup(medians[0] / medians[1]) if len(medians) == 2 and medians[1] > 0 else ""
    timed = zip(run.arms, medians, strict=True)
    cells = ["left out" if stage in arm.left_out else seconds(median_s) for arm, median_s in timed]
    return _row(STAGE_LABELS[stage], *cells, ratio)


def _result_row(result: Result, label: str) -> str:
    has_interval = result.estimate.ci95 is not None
    if not has_interval and not result.verdict:
        return _row(label, result.text, result.note)
    if result.unit == "x":
        ends = f"95 % interval {result.uncertainty}" if has_interval else result.uncertainty
        return _row(label, result.text, ": ".join(filter(None, (ends, result.verdict))))
    return _row(label, result.text, f"[{result.uncertainty.replace(' to ', ', ')}]", result.note)


def _asynchronous_lines(arm: LoopArm, shown: list[Result]) -> list[str]:
    """Lines of an asynchronous arm: its step, exposed and hidden generation, idle shares and results."""
    assert arm.over_synchronous is not None
    own = f", {POLICY_LABELS[arm.name]}"
    lag = f"{arm.loop}, lag at most {arm.max_off_policy_steps}, mean {arm.mean_lag:.2f}"
    in_turn, kind = speedup(arm.over_synchronous.value), _overlapping_verdict(arm.over_synchronous)
    idle = f"learner idle {percent(arm.learner_idle_fraction)}"
    return [
        _row(f"asynchronous, {arm.arm.value}", f"{seconds(arm.step.median)} s", lag),
        _row("  speedup over the same arm in turn", in_turn, f"{interval(arm.over_synchronous)}: {kind}"),
        _row("  control", "none", "training overlaps generation; unpaired"),
        _row("  exposed generation", f"{seconds(arm.exposed_s)} s", f"{seconds(arm.hidden_s)} s hidden"),
        _row("  engines idle", percent(arm.engine_idle_fraction), idle),
        *(_result_row(each, f"  {each.label.removesuffix(own)}") for each in shown if each.label.endswith(own)),
    ]
