"""The speedup table that ends a run in the terminal."""

from __future__ import annotations

from slipstream.records.run import NumericsRecord, RunRecord
from slipstream.records.stages import EvaluationRecord
from slipstream.report.asynchronous_arms import compare_loops
from slipstream.report.formats import POLICY_LABELS, STAGE_LABELS, interval, percent, seconds, speedup
from slipstream.report.summary import ArmSummary, Comparison, RunSummary, summarise_run
from slipstream.types import STAGES, Arm

_LABEL_WIDTH = 36
_COLUMN_WIDTH = 16
_WIDTH = _LABEL_WIDTH + 4 * _COLUMN_WIDTH
_SYNCHRONOUS = ("start", *(arm.value for arm in Arm))  # policies


def speedup_table(record: RunRecord) -> str:
    """Plain text of 100 columns: step time by stage, speedups with intervals, acceptance, reward, accuracy."""
    run = summarise_run(record)
    lines = [_row("median seconds a step", *[f"{arm.arm.value}" for arm in run.arms], "ratio"), "-" * _WIDTH]
    lines += [_stage_row(STAGE_LABELS[stage], run, stage) for stage in STAGES]
    lines += [_stage_row("step (wall time)", run, None), "-" * _WIDTH]
    lines += _speedup_lines(run.comparison)
    lines += _acceptance_lines(record, run)
    lines += [_reward_line(arm) for arm in run.arms]
    lines += [_accuracy_line(e) for e in record.evaluations if e.policy in _SYNCHRONOUS]
    weakest = max(power.detectable_total_variation for power in record.certificate.detectable)
    lines.append(_row("losslessness", record.certificate.verdict, f"a bias of {weakest:.3f} a token would be seen"))
    lines += _asynchronous_lines(record)
    if record.numerics is not None:
        lines.append(_row("computed in", record.numerics.dtype, _multiplication(record.numerics)))
    if record.logical_gpus:
        lines.append(_row("GPUs", "logical", "only counted; processes may have used CPUs"))
    return "\n".join(line.rstrip() for line in lines)


def _multiplication(numerics: NumericsRecord) -> str:
    return f"a product takes {numerics.float32_ms:.2f} ms in float32, {numerics.bfloat16_ms:.2f} in bfloat16"


def _row(label: str, *cells: str) -> str:
    *inner, last = cells
    return label.ljust(_LABEL_WIDTH) + "".join(cell.rjust(_COLUMN_WIDTH) for cell in inner) + "  " + last


def _stage_row(label: str, run: RunSummary, stage: str | None) -> str:
    medians = [(arm.stages[stage] if stage else arm.step).median for arm in run.arms]
    ratio = speedup(medians[0] / medians[1]) if len(medians) == 2 and medians[1] > 0 else ""
    timed = zip(run.arms, medians, strict=True)
    cells = ["left out" if stage in arm.left_out else seconds(median_s) for arm, median_s in timed]
    return _row(label, *cells, ratio)


def _speedup_lines(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return ["speedup: one arm alone gives none"]
    rows = {
        "generation speedup": comparison.generation,
        "  the same per generated token": comparison.generation_per_token,
        "step speedup": comparison.step,
    }
    lines = [_row(label, speedup(e.value), interval(e, "95 % interval ")) for label, e in rows.items()]
    return [*lines, _row("  bound, drafting for free", speedup(comparison.step_bound), "1 / (g / AL + 1 - g)")]


def _acceptance_lines(record: RunRecord, run: RunSummary) -> list[str]:
    if run.acceptance is None:
        return [_row("mean acceptance length", "1.00", f"nothing was drafted: {record.tuning.reason}")]
    k = run.speculative.k if run.speculative else 0
    by_position = " ".join(percent(rate) for rate in run.acceptance.rate_by_position)
    length = f"{run.acceptance.mean_acceptance_length:.2f}"
    return [_row("mean acceptance length", length, f"of at most {k + 1} (k = {k}); by position {by_position}")]


def _accuracy_line(evaluation: EvaluationRecord, label: str = "") -> str:
    return _row(
        label or f"AIME-2024-like, {POLICY_LABELS[evaluation.policy]}",
        f"{evaluation.avg_at_k:.3f}",
        f"[{evaluation.ci95[0]:.3f}, {evaluation.ci95[1]:.3f}]",
        f"avg@{evaluation.k} of {evaluation.num_problems} problems",
    )


def _asynchronous_lines(record: RunRecord) -> list[str]:
    """The arms of the other loop: step, speedup over the same arm in turn, what is exposed and hidden."""
    compared = compare_loops(record)
    if compared is None:
        return []
    lines = ["-" * _WIDTH]
    for arm in compared.asynchronous:
        assert arm.over_synchronous is not None and arm.over_baseline is not None
        lag = f"{arm.loop}, lag at most {arm.max_off_policy_steps}, mean {arm.mean_lag:.2f}"
        lines += [
            _row(f"asynchronous, {arm.arm.value}", f"{seconds(arm.step.median)} s", lag),
            _row(
                "  speedup over the same arm in turn",
                speedup(arm.over_synchronous.value),
                interval(arm.over_synchronous),
            ),
            _row("  over the synchronous baseline", speedup(arm.over_baseline.value), interval(arm.over_baseline)),
            _row("  exposed generation", f"{seconds(arm.exposed_s)} s", f"{seconds(arm.hidden_s)} s hidden"),
            _row(
                "  engines idle",
                percent(arm.engine_idle_fraction),
                f"learner idle {percent(arm.learner_idle_fraction)}",
            ),
            _row("  reward", f"{arm.reward_last_quarter:.3f}", f"first quarter {arm.reward_first_quarter:.3f}"),
            *(_accuracy_line(e, "  AIME-2024-like") for e in record.evaluations if e.policy == arm.name),
        ]
    return lines


def _reward_line(arm: ArmSummary) -> str:
    label = f"reward, {arm.arm.value}"
    return _row(label, f"{arm.reward_last_quarter:.3f}", f"last quarter; first quarter {arm.reward_first_quarter:.3f}")
