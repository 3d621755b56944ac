"""Load, memory pressure and clocks of the machine while the arms ran, and warnings about them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord, MachineUse
from slipstream.report.formats import POLICY_LABELS, percent

_MANY = {
    "other_cpu_fraction": (0.1, "other processes used {} of the cores"),
    "steal_fraction": (0.05, "the host gave {} of the cores' time to other machines"),
    "memory_pressure_fraction": (0.05, "processes waited for memory in {} of the time"),
}  # by field: the share from which a warning is due, and its text
_CLOCKS = {"cpu_mhz": "cores", "sm_clock_mhz": "GPUs"}
_CLOCKS_DIFFER = 1.1  # ratio of two arms' clocks above which a warning is due


def pooled_use(arm: ArmRecord) -> MachineUse | None:
    """Average the timed steps, weighted by their times; None if no step recorded its machine."""
    uses = [(step.times.step_s, step.machine) for step in arm.timed_steps if step.machine is not None]
    if not uses:
        return None
    means: dict[str, Any] = {}
    for name in ("load", *_MANY, *_CLOCKS):
        known = [(step_s, value) for step_s, use in uses if (value := getattr(use, name)) is not None]
        total_s = sum(step_s for step_s, _ in known)
        means[name] = sum(step_s * value for step_s, value in known) / total_s if total_s else None
    return MachineUse(
        **means, throttle_reasons=tuple(dict.fromkeys(each for _, use in uses for each in use.throttle_reasons))
    )


def findings(record: RunRecord) -> list[str]:
    """Warnings about conditions that may have changed an arm's times, one clause each; usually none."""
    uses = _uses(record)
    found: list[str] = []
    for arm, use in uses.items():
        shares = {name: getattr(use, name) for name in _MANY}
        large = {name: share for name, share in shares.items() if share is not None and share >= _MANY[name][0]}
        said = [_MANY[name][1].format(percent(share)) for name, share in large.items()]
        if use.throttle_reasons:
            said.append(f"the driver slowed GPUs down ({', '.join(use.throttle_reasons)})")
        found += [f"While {POLICY_LABELS[arm]} ran, {each}" for each in said]
    for name, label in _CLOCKS.items():
        clocks = sorted((mhz, POLICY_LABELS[arm]) for arm, use in uses.items() if (mhz := getattr(use, name)))
        if clocks and clocks[-1][0] > _CLOCKS_DIFFER * clocks[0][0]:
            ends = (f"{mhz:.0f} MHz in {arm}" for mhz, arm in (clocks[-1], clocks[0]))
            found.append(f"The {label} ran at {' and at '.join(ends)}")
    return found


def machine_json(record: RunRecord) -> dict[str, Any]:
    """Return the `machine` entry of `report.json`."""
    return {"arms": {arm: asdict(use) for arm, use in _uses(record).items()}, "findings": findings(record)}


def num_warmup_steps(record: RunRecord) -> int:
    """Number of first steps of each arm that its times leave out; 0 where an arm has only one step."""
    return max((len(arm.steps) - len(arm.timed_steps) for arm in (*record.arms, *record.asynchronous)), default=0)


def warmup_text(record: RunRecord) -> str:
    """State how many first steps medians and intervals leave out."""
    number = num_warmup_steps(record)
    if not number:
        return "One step ran: its times include the warm-up." if record.arms else ""
    steps = "first step of each arm is" if number == 1 else f"first {number} steps of each arm are"
    return f"The {steps} left out of medians and intervals: warm-up. Figures over steps show all."


def _uses(record: RunRecord) -> dict[str, MachineUse]:
    uses = {arm.name: pooled_use(arm) for arm in (*record.arms, *record.asynchronous)}
    return {name: use for name, use in uses.items() if use is not None}
