"""What an execution came to, as its MLflow run carries it: `result/…` metrics and a description in Markdown."""

from __future__ import annotations

from slipstream.losslessness.verdict import LOSSLESS
from slipstream.records.certificate import CertificateRecord
from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord
from slipstream.report.asynchronous_arms import compare_loops
from slipstream.report.asynchronous_results import loop_metrics
from slipstream.report.formats import POLICY_LABELS, interval, speedup
from slipstream.report.headline import verdict
from slipstream.report.summary import RunSummary, last_quarter, summarise_run
from slipstream.statistics import Estimate, bootstrap_difference
from slipstream.types import Arm


def result_metrics(record: RunRecord, *, hours: float, gpu_hours: float) -> dict[str, float]:
    """Every `result/…` metric; what the run lacks (an arm, a second timed step for an interval) is left out."""
    run = summarise_run(record)
    metrics = {
        "hours": hours,
        "gpu_hours": gpu_hours,
        "mean_acceptance_length": run.acceptance.mean_acceptance_length if run.acceptance else 1.0,
        "num_speculative_tokens": float(run.speculative.k if run.speculative else 0),
    }
    metrics |= {f"reward_{arm.arm.value}": arm.reward_last_quarter for arm in run.arms}
    metrics |= {f"tokens_per_s_{arm.arm.value}": arm.generation_tokens_per_s for arm in run.arms}
    if run.comparison is not None:
        metrics |= _with_ends("generation_speedup", run.comparison.generation)
        metrics |= _with_ends("step_speedup", run.comparison.step)
        metrics |= _with_ends("reward_difference", reward_difference(record))
    for evaluation in record.evaluations:
        accuracy = Estimate(value=evaluation.avg_at_k, ci95=(evaluation.ci95[0], evaluation.ci95[1]))
        metrics |= _with_ends(f"aime24_{evaluation.policy}", accuracy)
    metrics |= loop_metrics(record)
    return {f"result/{name}": value for name, value in metrics.items()} | certificate_metrics(record.certificate)


def certificate_metrics(certificate: CertificateRecord) -> dict[str, float]:
    """1 for an engine that was shown to draw from the policy, 0 for any other verdict."""
    return {"result/lossless": float(certificate.verdict == LOSSLESS)}


def reward_difference(record: RunRecord) -> Estimate:
    """Speculative minus autoregressive reward, of the mean over the last quarter of the steps that both arms made."""
    arms = {arm.arm: arm for arm in record.arms}
    base, spec = _rewards(arms[Arm.AUTOREGRESSIVE]), _rewards(arms[Arm.SPECULATIVE])
    shared = sorted(base.keys() & spec.keys())
    steps = last_quarter(shared)
    return bootstrap_difference([base[step] for step in steps], [spec[step] for step in steps])


def description(record: RunRecord, *, execution_url: str = "") -> str:
    """The run's description: the verdict in a sentence, and one table of its figures."""
    run = summarise_run(record)
    rows = [("figure", "value", "95 % interval"), ("---", "---", "---"), *_rows(record, run)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    link = f"\n\n[The execution in Flyte]({execution_url})" if execution_url else ""
    return f"{verdict(record, run)}\n\n{table}\n\nThe whole report is the artifact `report.html`.{link}"


def _rows(record: RunRecord, run: RunSummary) -> list[tuple[str, str, str]]:
    rows = []
    if run.comparison is not None:
        difference = reward_difference(record)
        rows += [
            ("generation speedup", speedup(run.comparison.generation.value), interval(run.comparison.generation)),
            ("step speedup", speedup(run.comparison.step.value), interval(run.comparison.step)),
            ("reward, speculative - autoregressive", f"{difference.value:+.3f}", _ends(difference)),
        ]
    rows += [(f"reward, {arm.arm.value}", f"{arm.reward_last_quarter:.3f}", "") for arm in run.arms]
    rows += _asynchronous_rows(record)
    for evaluation in record.evaluations:
        label = f"AIME-2024 avg@{evaluation.k}, {POLICY_LABELS[evaluation.policy]}"
        rows.append((label, f"{evaluation.avg_at_k:.3f}", f"{evaluation.ci95[0]:.3f} to {evaluation.ci95[1]:.3f}"))
    length = f"{run.acceptance.mean_acceptance_length:.2f}" if run.acceptance else "1.00"
    rows.append(("mean acceptance length", length, ""))
    return [*rows, ("losslessness", record.certificate.verdict, "")]


def _asynchronous_rows(record: RunRecord) -> list[tuple[str, str, str]]:
    """Of the arms of the other loop, against the synchronous autoregressive one."""
    compared = compare_loops(record)
    return [
        row
        for arm in (() if compared is None else compared.asynchronous)
        if arm.over_baseline is not None
        for row in (
            (f"step speedup, {POLICY_LABELS[arm.name]}", speedup(arm.over_baseline.value), interval(arm.over_baseline)),
            (f"reward, {POLICY_LABELS[arm.name]}", f"{arm.reward_last_quarter:.3f}", ""),
        )
    ]


def _rewards(arm: ArmRecord) -> dict[int, float]:
    return {step.step: step.reward_mean for step in arm.steps}


def _with_ends(name: str, estimate: Estimate) -> dict[str, float]:
    ends = dict(zip(("low", "high"), estimate.ci95 or (), strict=False))
    return {name: estimate.value, **{f"{name}_{end}": value for end, value in ends.items()}}


def _ends(estimate: Estimate) -> str:
    return "one step, no interval" if estimate.ci95 is None else f"{estimate.ci95[0]:+.3f} to {estimate.ci95[1]:+.3f}"
