"""Sentences of a report: its verdict, the draft length, the autopilot, and the bound of an asynchronous step."""

from __future__ import annotations

from slipstream.drafts.length import DraftLength, described
from slipstream.records.run import RunRecord
from slipstream.records.steps import ArmRecord
from slipstream.report.claims import said
from slipstream.report.formats import (
    difference_with_interval,
    percent,
    seconds,
    speedup,
    speedup_with_interval,
)
from slipstream.report.summary import LoopArm, LoopComparison, RunSummary, accuracy_difference
from slipstream.types import Arm

LEARNER_BOUND = 0.05
"""Largest share of a step that training waits for rollouts if the learner bounds the step."""

_LESS_TRAINING = 0.95
"""Training beside speculation that takes less than this share of the time without it is said to be faster."""


def verdict(record: RunRecord, run: RunSummary) -> str:
    """The effect of speculation on generation and step, with its uncertainty; a warning if the arms do not compare."""
    machines = {arm.arm.value: arm.machine for arm in record.arms if arm.machine}
    effect = _effect(record, run)
    if len(set(machines.values())) < 2:
        return effect
    where = ", ".join(f"{arm} on {machine}" for arm, machine in machines.items())
    return f"{effect} The arms ran on different hardware ({where}): their ratio is no speedup of speculation alone."


def _effect(record: RunRecord, run: RunSummary) -> str:
    comparison = run.comparison
    if comparison is None or run.speculative is None:
        return "Only one arm ran, so this page shows times and learning, and no speedup."
    if run.speculative.k == 0:
        why = f"Speculation lost, so both arms ran without it ({record.tuning.reason})"
        return f"{why}: their ratio shows the machine's noise. {said(comparison.claims)}"
    lengths = [arm_length(arm) for arm in record.arms if arm.arm is Arm.SPECULATIVE]
    return f"Speculation ({record.draft.method}, k = {lengths[0]}) against none. {said(comparison.claims)}"


def arm_length(arm: ArmRecord) -> str:
    """An arm's k, in words where it goes by the running batch."""
    length = DraftLength(num_speculative_tokens=arm.num_speculative_tokens, schedule=arm.schedule)
    return length.label if length.label != "by_batch" else f"by running batch ({described(length.schedule)})"


def schedule_text(record: RunRecord) -> str:
    """The schedule, what it is expected to gain, and whether the arm drafted by it."""
    tuning = record.tuning
    if len({entry.num_speculative_tokens for entry in tuning.schedule}) < 2:
        return f"No running batch wants another draft length: k = {tuning.chosen_k} everywhere."
    used = any(arm.schedule for arm in record.arms if arm.arm is Arm.SPECULATIVE)
    return (
        f"By running batch: {described(tuning.schedule)}. By these times it decodes {speedup(tuning.schedule_gain)} as "
        f"fast as k = {tuning.chosen_k} throughout. "
        f"{'The speculative arm drafted by it.' if used else 'The arm drafted with one k all the same.'}"
    )


def autopilot_text(record: RunRecord) -> str:
    """A summary of what the autopilot did; empty where none was on."""
    flown = [(step.step, step.autopilot) for arm in record.arms for step in arm.steps if step.autopilot is not None]
    if not flown:
        return ""
    without = sum(not each.speculates for _, each in flown)
    probes = sum(each.is_probe for _, each in flown)
    switched = [(step, each.speculates) for step, each in flown if each.has_switched]
    turns = ", ".join(f"step {step + 1} ({'on again' if is_on else 'off'})" for step, is_on in switched)
    told = f"It turned at {turns}." if turns else "It never turned speculation off."
    return (
        f"The autopilot had {without} of {len(flown)} steps generate without drafts, {probes} steps were probes. {told}"
    )


def accuracy_text(record: RunRecord) -> str:
    """Whether the arms differ at the last point of their accuracy curves; empty where there is none."""
    compared = accuracy_difference(record)
    if compared is None:
        return ""
    step, difference = compared
    said = "too few problems for an interval, or all alike"
    if difference.ci95 is not None:
        is_seen = not difference.ci95[0] <= 0.0 <= difference.ci95[1]
        said = "the arms differ" if is_seen else "no difference beyond the noise is seen"
    apart = (
        " Arms that generate while they train are evaluated before and after it alone." if record.asynchronous else ""
    )
    return (
        f"After step {step} the accuracy of the speculative arm less that of the autoregressive one is "
        f"{difference_with_interval(difference)}, paired by problem: {said}.{apart}"
    )


def bound_text(compared: LoopComparison) -> str:
    """The bound of the asynchronous step without speculation, and so of the gain by speculation; empty: unknown."""
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
        ratio = speedup_with_interval(compared.speculation)
        noise = f"nothing was drafted here, so the ratio of both arms, {ratio}, shows the machine's noise"
        measured = f"; {noise}" if drafting is None else f". {said({'speculation': compared.claim}).removesuffix('.')}"
    most = f"at most about {speedup(1 / (1 - share))} can be had of it{measured}.{_helped(base, drafting)}"
    if share < LEARNER_BOUND:
        return (
            f"The learner bounds the asynchronous step: {waits}. Speculation shortens generation that is hidden behind "
            f"training already, so it gains nothing here but that wait: {most}"
        )
    to = "" if drafting is None else f" to {seconds(drafting.exposed_s)} s"
    return f"Generation bounds the asynchronous step: {waits}. Speculation shortens that wait{to}: {most}"


def _helped(base: LoopArm, drafting: LoopArm | None) -> str:
    """A sentence where training itself was faster beside engines that are done sooner, which is none of the wait."""
    before_s, after_s = base.stages_s["train"], (drafting or base).stages_s["train"]
    if after_s >= _LESS_TRAINING * before_s:
        return ""
    return (
        f" Training itself takes {seconds(after_s)} s beside it instead of {seconds(before_s)} s, which is no part of "
        "that bound: where engines and learner share a host's cores, engines that are done sooner leave theirs to it."
    )
