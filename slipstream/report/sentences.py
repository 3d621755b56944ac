"""Sentences of a report: verdict, draft length, autopilot, accuracy, the bound of an asynchronous step, the machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slipstream.drafts.length import DraftLength, described
from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord, MachineUse
from slipstream.report.claims import said
from slipstream.report.formats import POLICY_LABELS, percent, seconds, speedup, with_interval
from slipstream.report.summary import LoopArm, LoopComparison, accuracy_difference, decided_steps, summarise_arms
from slipstream.simulator.balance import AsynchronousPrediction
from slipstream.types import Arm, Arms

_LEARNER_BOUND = 0.05  # largest share of a step that training waits for rollouts while the learner bounds the step
_LESS_TRAINING = 0.95  # ratio of training times beside speculation and without it, below which training is faster
_MANY = {
    "other_cpu_fraction": (0.1, "other processes used {} of the cores"),
    "steal_fraction": (0.05, "the host gave {} of the cores' time to other machines"),
    "memory_pressure_fraction": (0.05, "processes waited for memory in {} of the time"),
}  # by field: the share from which a warning is due, and its text
_CLOCKS = {"cpu_mhz": "cores", "sm_clock_mhz": "GPUs"}
_CLOCKS_DIFFER = 1.1  # ratio of two arms' clocks above which a warning is due


def verdict(record: RunRecord) -> str:
    """State the effect of speculation with its uncertainty; warn if the arms ran on different machines."""
    machines = {arm.arm.value: arm.machine for arm in record.arms if arm.machine}
    effect = _effect(record)
    if len(set(machines.values())) < 2:
        return effect
    where = ", ".join(f"{arm} on {machine}" for arm, machine in machines.items())
    what = "their ratio is not the speedup of speculation alone"
    return f"{effect} The arms ran on different hardware ({where}): {what}."


def _effect(record: RunRecord) -> str:
    run = summarise_arms(record.arms)
    comparison = run.comparison
    reason, method = (record.tuning and record.tuning.reason, record.draft and record.draft.method)
    greedy = ", greedy drafts" if record.tuning and record.tuning.sampling == "greedy" else ""
    speculation = [f"{method}, k = {arm_length(arm)}{greedy}" for arm in record.arms if arm.arm is Arm.SPECULATIVE]
    if run.alone is not None:
        lost = run.speculative is not None and run.speculative.k == 0
        how = "".join(f" ({f'without drafts: {reason}' if lost else each})" for each in speculation)
        missing = "baseline" if speculation else "speculative arm"
        return (
            f"The {run.alone.arm.value} arm was trained alone{how}. There is no {missing} beside it, so no speedup is "
            f"claimed; --arms {Arms.BOTH} trains both."
        )
    if comparison is None or run.speculative is None:
        return "No arm was trained."
    if run.speculative.k == 0:
        why = f"Speculation lost, so both arms ran without it ({reason})"
        return f"{why}: their ratio shows the machine's noise. {said(comparison.claims)}"
    return f"Speculation ({speculation[0]}) against none. {said(comparison.claims)}"


def arm_length(arm: ArmRecord) -> str:
    """Format an arm's draft length, or its schedule by running batch."""
    length = DraftLength(num_speculative_tokens=arm.num_speculative_tokens, schedule=arm.schedule)
    return length.label if length.label != "by_batch" else f"by running batch ({described(length.schedule)})"


def schedule_text(record: RunRecord) -> str:
    """Describe the schedule of draft lengths, its expected gain, and whether the arm used it."""
    tuning = record.tuning
    assert tuning is not None
    if len({entry.num_speculative_tokens for entry in tuning.schedule}) < 2:
        return f"The schedule has one draft length, k = {tuning.chosen_k} at every running batch."
    used = any(arm.schedule for arm in record.arms if arm.arm is Arm.SPECULATIVE)
    return (
        f"By running batch: {described(tuning.schedule)}. Its expected speedup of generation is "
        f"{speedup(tuning.schedule_gain)} over k = {tuning.chosen_k} throughout. "
        f"{'The speculative arm used it.' if used else 'The speculative arm used one k instead.'}"
    )


def draft_text(record: RunRecord) -> str:
    """State how often the draft learned beside the policy, and the cost of that; empty for a fixed draft."""
    steps = [step for step, _ in decided_steps(record)]
    if not steps:
        return ""
    spent_s = [step.draft_update.elapsed_s for step in steps if step.draft_update is not None]
    share = percent(sum(spent_s) / sum(step.times.step_s for step in steps))
    return (
        f"The draft learned beside the policy in {len(spent_s)} of {len(steps)} steps, which took "
        f"{seconds(sum(spent_s))} s, {share} of the arm's time."
    )


def autopilot_text(record: RunRecord) -> str:
    """Summarise the autopilot's decisions; empty where it was off."""
    flown = [(step.step, step.autopilot) for arm in record.arms for step in arm.steps if step.autopilot is not None]
    if not flown:
        return ""
    without = sum(not each.speculates for _, each in flown)
    probes = sum(each.is_probe for _, each in flown)
    switched = [(step, each.speculates) for step, each in flown if each.has_switched]
    turns = ", ".join(f"step {step + 1} ({'on again' if is_on else 'off'})" for step, is_on in switched)
    told = f"It switched at {turns}." if turns else "It never switched."
    return f"The autopilot ran {without} of {len(flown)} steps without drafts, {probes} of all as probes. {told}"


def accuracy_text(record: RunRecord) -> str:
    """State if the arms' accuracies differ at the last common point of their curves; empty without one."""
    compared = accuracy_difference(record)
    if compared is None:
        return ""
    step, difference = compared
    said = "too few problems for an interval, or all alike"
    if difference.ci95 is not None:
        is_seen = not difference.ci95[0] <= 0.0 <= difference.ci95[1]
        said = "the arms differ" if is_seen else "no difference beyond the noise is seen"
    apart = " Asynchronous arms are evaluated only before and after RL." if record.asynchronous else ""
    return (
        f"After step {step} the accuracy of the speculative arm minus that of the autoregressive one is "
        f"{with_interval(difference, 'reward difference')}, paired by problem: {said}.{apart}"
    )


def bound_text(compared: LoopComparison) -> str:
    """State what bounds the asynchronous step, and so the gain of speculation; empty without a baseline."""
    base = next((arm for arm in compared.asynchronous if arm.arm is Arm.AUTOREGRESSIVE), None)
    if base is None:
        return ""
    drafting = next((arm for arm in compared.asynchronous if arm.num_speculative_tokens), None)
    share = base.exposed_s / base.step_s
    waits = (
        f"without speculation training waits for rollouts {seconds(base.exposed_s)} s of a step of "
        f"{seconds(base.step_s)} s ({percent(share)})"
    )
    measured = ""
    if compared.speculation is not None and compared.claim is not None:
        ratio = with_interval(compared.speculation)
        noise = f"nothing was drafted here, so the ratio of both arms, {ratio}, shows the machine's noise"
        measured = f"; {noise}" if drafting is None else f". {said({'speculation': compared.claim}).removesuffix('.')}"
    most = f"at most about {speedup(1 / (1 - share))} can be had of it{measured}.{_helped(base, drafting)}"
    if share < _LEARNER_BOUND:
        return (
            f"The learner bounds the asynchronous step: {waits}. Speculation shortens generation that is hidden behind "
            f"training already, so it gains nothing here but that wait: {most}"
        )
    to = "" if drafting is None else f" to {seconds(drafting.exposed_s)} s"
    return f"Generation bounds the asynchronous step: {waits}. Speculation shortens that wait{to}: {most}"


def split_text(prediction: AsynchronousPrediction) -> str:
    """State what the simulator expects of two cores, which have only one split."""
    bounds = " and ".join(f"the {arm.arm.value} step to be bound by its {arm.bound.value}" for arm in prediction.arms)
    split = "Two cores have one split, one core for generation and one for training."
    return f"{split} On it the simulator expects {bounds}."


def _helped(base: LoopArm, drafting: LoopArm | None) -> str:
    """Explain a step whose training itself got faster beside speculation; empty for any other step."""
    before_s, after_s = base.stages_s["train"], (drafting or base).stages_s["train"]
    if after_s >= _LESS_TRAINING * before_s:
        return ""
    return (
        f" Training itself takes {seconds(after_s)} s beside it instead of {seconds(before_s)} s, which is no part of "
        "that bound: where engines and learner share a host's cores, engines that are done sooner leave theirs to it."
    )


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
        shares = [(getattr(use, name), least, text) for name, (least, text) in _MANY.items()]
        said = [text.format(percent(share)) for share, least, text in shares if share is not None and share >= least]
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
