"""Drift detection: results of an execution outside the prediction bands of comparable earlier executions.

A band is a prediction interval from the spread of earlier executions. With Q judged results each interval has the level
1 - FALSE_ALARM_RATE / Q (Bonferroni). An execution without drift is then flagged at most that often, however its
results depend on each other. The rate is approximate for results that are not normally distributed over executions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy import special

from slipstream.recipe import OPERATION
from slipstream.records.run import DriftFinding, DriftRecord, RunRecord
from slipstream.report.claims import ClaimKind, recorded
from slipstream.report.formats import KINDS
from slipstream.tracking.config import DriftConfig
from slipstream.tracking.mlflow_store import Execution

_HARDWARE, _DTYPE = "hardware", "dtype"
MIN_EXECUTIONS = 5  # fewer are too few to say
FALSE_ALARM_RATE = 0.05  # of an execution in which nothing drifted, over all its results together
_MIN_CHANGE = 0.01  # a smaller one is none: of the mean, or absolute for rewards and accuracies
WITHIN, ABOVE, BELOW, TOO_FEW = "within", "above", "below", "too few to say"
NOT_MEASURED = ClaimKind.NOT_MEASURED.value


def setting_tags(record: RunRecord) -> dict[str, str]:
    """Tags of an execution that comparable ones share: the machines that timed the arms, and the type of `auto`."""
    machines = "; ".join(dict.fromkeys(arm.machine for arm in record.arms if arm.machine)) or record.machine
    return {_HARDWARE: machines, **({} if record.numerics is None else {_DTYPE: record.numerics.dtype})}


def find_drift(subject: Execution, executions: Iterable[Execution], config: DriftConfig) -> DriftRecord:
    """Judge the subject's results by the latest comparable ones of `executions`, newest first; it may be among them."""
    earlier = comparable(subject, executions, config)
    own = {name: value for name in KINDS if (value := subject.metrics.get(f"result/{name}")) is not None}
    known = {name: _values(earlier, name) for name in own if KINDS[name].judged}
    measured = {name for name in known if _is_measured(subject.metrics, name)}
    num_judged = sum(len(known[name]) >= MIN_EXECUTIONS for name in measured)
    level = 1 - FALSE_ALARM_RATE / max(1, num_judged)
    findings = tuple(
        _judge(name, own[name], values, level if name in measured else None) for name, values in known.items()
    )
    return DriftRecord(
        summary=_summary(findings, len(earlier)),
        executions=tuple(execution.name for execution in earlier),
        false_alarm_rate=FALSE_ALARM_RATE,
        findings=findings,
    )


def comparable(subject: Execution, executions: Iterable[Execution], config: DriftConfig) -> list[Execution]:
    """Select the latest executions, lossless if they speculated, of the subject's recipe, workload and hardware.

    Seeds are part of the noise. Executions with the subject's own seeds are used alone where there are enough.
    Otherwise each choice of seeds counts once, by its newest execution: repetitions do not show the spread over seeds.
    """
    found = [execution for execution in executions if _is_comparable(subject, execution)]
    own = [execution for execution in found if _seeds(execution.params) == _seeds(subject.params)]
    newest: dict[tuple[tuple[str, str], ...], Execution] = {}
    for execution in found:
        newest.setdefault(_seeds(execution.params), execution)
    chosen = own if len(own) >= min(MIN_EXECUTIONS, len(newest)) else list(newest.values())
    return chosen[: config.num_executions]


def prediction_interval(values_N: Sequence[float], *, level: float) -> tuple[float, float]:
    """Interval that holds one further value with probability `level`, if all values share one normal distribution.

    mean +- t s sqrt(1 + 1/N), with s the standard deviation over N - 1 and t the quantile of Student's distribution
    with N - 1 degrees of freedom. Few values give a wide interval; there must be two.

    Source:
        Hahn and Meeker, Statistical Intervals (1991), chapter 4: prediction interval for one future observation.
    """
    values = np.asarray(values_N, dtype=np.float64)
    quantile = special.stdtrit(len(values) - 1, (1 + level) / 2)
    half = quantile * float(values.std(ddof=1)) * math.sqrt(1 + 1 / len(values))
    return float(values.mean() - half), float(values.mean() + half)


def drift_metrics(drift: DriftRecord) -> dict[str, float]:
    """Metrics `drift/…`: for each judged result -1, 0 or 1 (below, within, above), and the ends of its band."""
    metrics = {"drift/num_executions": float(len(drift.executions)), "drift/num_outside": float(len(drift.outside))}
    for finding in drift.findings:
        if finding.band is not None:
            name = f"drift/{finding.name}"
            metrics[name] = {BELOW: -1.0, WITHIN: 0.0, ABOVE: 1.0}[finding.verdict]
            metrics[f"{name}_low"], metrics[f"{name}_high"] = finding.band
    return metrics


def drift_tags(drift: DriftRecord) -> dict[str, str]:
    """Tags of an execution: `drift.verdict` as a filter, and `drift.summary` as a sentence."""
    names = ", ".join(f"{finding.name} {finding.verdict}" for finding in drift.outside)
    judged = any(finding.band is not None for finding in drift.findings)
    return {"drift.verdict": names or (WITHIN if judged else TOO_FEW), "drift.summary": drift.summary}


def _is_comparable(subject: Execution, execution: Execution) -> bool:
    """Compare every parameter that both have, but for seeds and operational fields.

    A parameter that only one has was added or removed between their commits.
    """
    free = ("seed", *OPERATION)
    has_report = "result/hours" in execution.metrics  # without a certificate, where nothing speculated
    shared = {name for name in subject.params.keys() & execution.params.keys() if name.rpartition(".")[2] not in free}
    return (
        execution.name != subject.name
        and execution.metrics.get("result/lossless", float(has_report)) == 1
        and all(execution.tags.get(tag) == subject.tags.get(tag) for tag in ("workload", _HARDWARE, _DTYPE))
        and all(subject.params[name] == execution.params[name] for name in shared)
    )


def _seeds(params: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in params.items() if name.rpartition(".")[2] == "seed"))


def _values(executions: Sequence[Execution], name: str) -> list[float]:
    found = (execution.metrics for execution in executions if _is_measured(execution.metrics, name))
    values = (metrics.get(f"result/{name}", math.nan) for metrics in found)
    return [value for value in values if math.isfinite(value)]


def _is_measured(metrics: Mapping[str, float], name: str) -> bool:
    """Return False for a speedup without a verdict: its control or its interval is missing, or the control is off."""
    if KINDS[name].unit != "x":
        return True
    claim = recorded(metrics, name)
    return claim is not None and claim.kind is not ClaimKind.NOT_MEASURED


def _judge(name: str, value: float, earlier: Sequence[float], level: float | None) -> DriftFinding:
    """Judge one result at `level`; None where the result itself is not measured."""
    band, verdict = None, NOT_MEASURED if level is None else TOO_FEW
    if level is not None and len(earlier) >= MIN_EXECUTIONS:
        low, high = prediction_interval(earlier, level=level)
        mean = float(np.mean(earlier))
        least = _MIN_CHANGE * (abs(mean) if KINDS[name].judged == "relative" else 1.0)
        band = low, high = min(low, mean - least), max(high, mean + least)
        verdict = BELOW if value < low else ABOVE if value > high else WITHIN
    return DriftFinding(name=name, value=value, num_executions=len(earlier), band=band, verdict=verdict)


def _summary(findings: Sequence[DriftFinding], num_earlier: int) -> str:
    judged = [(finding, finding.band) for finding in findings if finding.band is not None]
    unmeasured = ", ".join(KINDS[finding.name].label for finding in findings if finding.verdict == NOT_MEASURED)
    left_out = f" Not measured: {unmeasured}." if unmeasured else ""
    if not judged:
        before = f"Comparable executions before this one: {num_earlier}."
        return f"{before} Fewer than {MIN_EXECUTIONS} say nothing.{left_out}"
    outside = [
        f"{KINDS[finding.name].label} {finding.value:.4g} lies {finding.verdict} {low:.4g} to {high:.4g}"
        for finding, (low, high) in judged
        if finding.verdict != WITHIN
    ]
    if not outside:
        within = f"all {len(judged)} results lie within the bands of the {num_earlier} executions before"
        return f"No drift: {within}.{left_out}"
    return f"Drift against the {num_earlier} executions before: {'; '.join(outside)}.{left_out}"
