"""The sentence that a report opens with, on its page and in MLflow."""

from __future__ import annotations

from slipstream.records.run import RunRecord
from slipstream.report import formats
from slipstream.report.draft_length import arm_length
from slipstream.report.summary import RunSummary
from slipstream.types import Arm


def verdict(record: RunRecord, run: RunSummary) -> str:
    """What speculation did to generation and to the step, with its uncertainty, and whether the arms compare at all."""
    return f"{_effect(record, run)}{_unequal_hardware(record)}"


def _unequal_hardware(record: RunRecord) -> str:
    """A warning, if the arms were timed on machines that differ."""
    machines = {arm.arm.value: arm.machine for arm in record.arms if arm.machine}
    if len(set(machines.values())) < 2:  # one machine
        return ""
    where = ", ".join(f"{arm} on {machine}" for arm, machine in machines.items())
    return f" The arms ran on different hardware ({where}): their ratio is no speedup of speculation alone."


def _effect(record: RunRecord, run: RunSummary) -> str:
    comparison = run.comparison
    if comparison is None:
        return "Only one arm ran, so this page shows times and learning, and no speedup."
    k = run.speculative.k if run.speculative else 0
    generation, step = (
        f"{formats.speedup(estimate.value)} ({formats.interval(estimate, '95 % interval ')})"
        for estimate in (comparison.generation, comparison.step)
    )
    if k == 0:
        return (
            f"Speculation lost, so both arms ran without it ({record.tuning.reason}): "
            f"the ratio of the arms, {generation} for generation and {step} for the step, shows the machine's noise."
        )
    lengths = [arm_length(arm) for arm in record.arms if arm.arm is Arm.SPECULATIVE]
    method = f"Speculation ({record.draft.method}, k = {lengths[0]})"
    if comparison.generation.ci95 is None:
        ratios = [formats.speedup(estimate.value) for estimate in (comparison.generation, comparison.step)]
        return (
            f"{method}: generation {ratios[0]}, the whole GRPO step {ratios[1]}; "
            "but an arm with one timed step tells nothing about the noise."
        )
    low, high = comparison.generation.ci95
    if low > 1:
        return f"{method} sped rollout generation up {generation} and the whole GRPO step {step}."
    if high < 1:
        return f"{method} lost: it slowed rollout generation down to {generation} and the whole GRPO step to {step}."
    return f"{method} made no difference beyond the noise: generation {generation}, the whole GRPO step {step}."
