"""Sentences about the machine, the warm-up and the draft during RL, and where they stand.

Figures of machines are worked by hand; the first step of each arm says what would move every one of them.
"""

from dataclasses import replace

import pytest

from slipstream.records.run import RunRecord
from slipstream.records.stages import RunningPoint, SamplingPoint
from slipstream.records.steps import ArmRecord, AutopilotStep, DraftUpdate, MachineUse, ScheduleEntry
from slipstream.report.page import draw, report_json
from slipstream.report.results import terminal_table
from slipstream.report.sentences import (
    arm_length,
    autopilot_text,
    draft_text,
    findings,
    machine_json,
    pooled_use,
    schedule_text,
    warmup_text,
)
from slipstream.report.tables import running_table, sampling_table
from slipstream.types import Arm
from tests.unit.report.handmade import ASYNCHRONOUS, BARE, CERTIFICATE, ONE_STEP, RECORD, TUNING, page_text
from tests.unit.sampled import DECISION

QUIET = MachineUse(load=1.0, other_cpu_fraction=0.0, steal_fraction=0.0, memory_pressure_fraction=0.0, cpu_mhz=2000.0)
_READ = ("load", "other_cpu_fraction", "steal_fraction", "memory_pressure_fraction", "cpu_mhz")
UNKNOWN = MachineUse(**dict.fromkeys(_READ))
WARMUP = replace(QUIET, other_cpu_fraction=1.0, cpu_mhz=100.0, throttle_reasons=("power brake",))


def on(arm: ArmRecord, *uses: MachineUse | None) -> ArmRecord:
    """The arm with these machines at its steps after the first; the last one lasts."""
    rest = [uses[min(index, len(uses) - 1)] for index in range(len(arm.steps) - 1)]
    machines = zip(arm.steps, (WARMUP, *rest), strict=True)
    return replace(arm, steps=tuple(replace(step, machine=use) for step, use in machines))


def ran(base: MachineUse, spec: MachineUse = QUIET) -> RunRecord:
    return replace(RECORD, arms=(on(RECORD.arms[0], base), on(RECORD.arms[1], spec)))


def test_an_arms_machine_is_the_mean_over_its_timed_steps_by_their_times() -> None:
    """Steps of 8, 8 and then 24.5 s: (8 * 0.54 + 24.5 * 0.27) / 40.5 is 0.27; the second step could read no clock."""
    arm = on(
        RECORD.arms[0],
        replace(QUIET, other_cpu_fraction=0.54, throttle_reasons=("power cap",)),
        replace(QUIET, cpu_mhz=None),
        replace(QUIET, other_cpu_fraction=0.27, cpu_mhz=3900.0, throttle_reasons=("power cap", "power brake")),
    )
    use = pooled_use(arm)
    assert use is not None
    assert (use.other_cpu_fraction, use.cpu_mhz) == pytest.approx((0.27, (8 * 2000.0 + 24.5 * 3900.0) / 32.5))
    assert (use.load, use.sm_clock_mhz, use.throttle_reasons) == (1.0, None, ("power cap", "power brake"))
    assert pooled_use(RECORD.arms[0]) is None
    assert machine_json(RECORD) == {"arms": {}, "findings": []}


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ({"other_cpu_fraction": 0.34}, "other processes used 34 % of the cores"),
        ({"other_cpu_fraction": 0.101}, "other processes used 10 % of the cores"),
        ({"steal_fraction": 0.0501}, "the host gave 5.0 % of the cores' time to other machines"),
        ({"memory_pressure_fraction": 0.0501}, "processes waited for memory in 5.0 % of the time"),
        ({"throttle_reasons": ("power cap", "power brake")}, "the driver slowed GPUs down (power cap, power brake)"),
    ],
)
def test_what_may_have_moved_an_arms_times_is_said_of_that_arm(use: dict[str, object], said: str) -> None:
    assert findings(ran(replace(QUIET, **use))) == [f"While autoregressive ran, {said}"]
    assert findings(ran(QUIET, replace(QUIET, **use))) == [f"While speculative ran, {said}"]


def test_clocks_that_differ_between_arms_by_more_than_a_tenth_are_said_and_quiet_or_unread_machines_are_not() -> None:
    assert findings(ran(replace(QUIET, cpu_mhz=2201.0))) == [
        "The cores ran at 2201 MHz in autoregressive and at 2000 MHz in speculative"
    ]
    fast, slow = (replace(QUIET, sm_clock_mhz=mhz) for mhz in (1980.0, 1200.0))
    assert findings(ran(slow, fast)) == ["The GPUs ran at 1980 MHz in speculative and at 1200 MHz in autoregressive"]
    little = replace(
        QUIET, other_cpu_fraction=0.099, steal_fraction=0.049, memory_pressure_fraction=0.049, cpu_mhz=2200.0
    )
    assert findings(ran(little)) == []
    assert findings(ran(UNKNOWN)) == []


def test_findings_stand_on_the_page_in_the_terminal_and_in_the_json_with_the_asynchronous_arms_name() -> None:
    record = ran(replace(QUIET, other_cpu_fraction=0.34))
    said = "While autoregressive ran, other processes used 34 % of the cores"
    assert said in page_text(record)
    assert said in terminal_table(record).splitlines()
    machine = report_json(record)["machine"]
    assert machine["findings"] == [said]
    assert machine["arms"]["autoregressive"]["other_cpu_fraction"] == pytest.approx(0.34)
    assert machine["arms"]["speculative"]["throttle_reasons"] == ()
    loud = on(ASYNCHRONOUS.asynchronous[0], replace(QUIET, other_cpu_fraction=0.5))
    record = replace(ASYNCHRONOUS, asynchronous=(loud, ASYNCHRONOUS.asynchronous[1]))
    assert findings(record) == ["While autoregressive, asynchronous ran, other processes used 50 % of the cores"]
    assert list(machine_json(record)["arms"]) == ["autoregressive_asynchronous"]


def test_the_page_and_the_json_say_how_many_first_steps_are_left_out() -> None:
    two = replace(RECORD, arms=tuple(replace(arm, num_warmup_steps=2) for arm in RECORD.arms))
    assert "The first 2 steps of each arm are left out of medians and intervals: warm-up." in page_text(two)
    assert "The first step of each arm is left out of medians and intervals: warm-up." in page_text(RECORD)
    assert warmup_text(ONE_STEP) == "One step ran: its times include the warm-up."
    assert warmup_text(BARE) == ""
    assert [report_json(each)["num_warmup_steps"] for each in (two, RECORD, ONE_STEP, BARE)] == [2, 1, 0, 0]


TABLE = tuple(
    ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k) for start, end, k in ((1, 2, 5), (3, 4, 2))
)


def point(k: int, start: int, end: int, speedup: float) -> RunningPoint:
    measured = {"num_rounds": 4, "num_steps": 40, "token_ms": 2.0, "tokens_per_step": 1.5, "gain": 1.0, "gain_low": 1.0}
    return RunningPoint(k=k, batch_from=start, batch_to=end, speedup=speedup, **measured)


POINTS = (point(2, 1, 2, 1.5), point(5, 1, 2, 2.0), point(2, 3, 4, 1.25))
BY_BATCH = replace(TUNING, chosen_k=2, schedule=TABLE, running=POINTS, schedule_gain=1.1)


def record(*, arm_has_it: bool = True, flown: tuple[AutopilotStep, ...] = ()) -> RunRecord:
    def arm(each: ArmRecord) -> ArmRecord:
        if each.arm is not Arm.SPECULATIVE:
            return each
        template = each.steps[0]
        steps = tuple(replace(template, step=i, autopilot=step) for i, step in enumerate(flown)) or each.steps
        return replace(each, num_speculative_tokens=5, schedule=TABLE if arm_has_it else (), steps=steps)

    return replace(RECORD, tuning=BY_BATCH, arms=tuple(map(arm, RECORD.arms)))


def test_every_k_is_shown_at_every_running_batch_with_the_schedules_own() -> None:
    table = running_table(BY_BATCH)
    assert next(iter(table.groups.values())) == ["k = 2", "k = 5"]
    assert [(row.label, row.cells, row.kind) for row in table.rows] == [
        ("1 to 2", ("1.50x", "2.00x", "k = 5"), "chosen"),
        ("3 to 4", ("1.25x", "", "k = 2"), ""),
    ]
    off = replace(point(0, 3, 4, 0.9), is_switched_off=True)
    table = running_table(replace(TUNING, chosen_k=2, schedule=TABLE, running=(point(0, 3, 4, 1.0), off, *POINTS)))
    assert next(iter(table.groups.values())) == ["k = 0", "drafts switched off", "k = 2", "k = 5"]
    assert table.rows[1].cells == ("1.00x", "0.90x", "1.25x", "", "k = 2")


def test_a_schedule_is_said_with_what_it_should_gain_and_names_the_arm_that_used_it() -> None:
    assert schedule_text(record()) == (
        "By running batch: 1-2: 5, 3-4: 2. Its expected speedup of generation is 1.10x over k = 2 throughout. "
        "The speculative arm used it."
    )
    assert schedule_text(record(arm_has_it=False)).endswith("The speculative arm used one k instead.")
    constant = replace(RECORD, tuning=replace(TUNING, schedule=TABLE[1:], chosen_k=2))
    assert schedule_text(constant) == "The schedule has one draft length, k = 2 at every running batch."
    lengths = [arm_length(arm) for arm in record().arms]
    assert lengths == ["0", "by running batch (1-2: 5, 3-4: 2)"]


def test_the_autopilots_turns_are_said_step_by_step_and_stand_on_the_page_with_the_table() -> None:
    on = AutopilotStep(speculates=True, is_probe=False, token_ms=1.0)
    off = AutopilotStep(speculates=False, is_probe=False, token_ms=1.0)
    probe = replace(off, is_probe=True)
    flown = (on, probe, replace(off, has_switched=True), off, replace(on, has_switched=True))
    assert autopilot_text(record(flown=flown)) == (
        "The autopilot ran 3 of 5 steps without drafts, 1 of all as probes. "
        "It switched at step 3 (off), step 5 (on again)."
    )
    assert autopilot_text(record(flown=(on, on))).endswith("It never switched.")
    assert autopilot_text(RECORD) == ""
    page = page_text(record(flown=(on, on)))
    assert "k = by running batch (1-2: 5, 3-4: 2)" in page
    assert "running batch" in page
    assert "The autopilot ran 0 of 2 steps" in page


NO = replace(
    DECISION, trains=False, reason="nothing is lost", length=2.4, reference_length=2.4, saved_s=0.0, lost_s=0.0
)
YES = replace(DECISION, length=2.0, reference_length=2.4, cost_s=0.5)


def trained_record() -> RunRecord:
    """One speculative step takes 52 s and five take 5; the last two trained the draft for 0.5 and 0.75 s."""
    base, spec = RECORD.arms
    seconds = (*[None] * 4, 0.5, 0.75)
    steps = tuple(
        replace(
            step,
            draft_decision=NO if elapsed_s is None else YES,
            draft_update=None if elapsed_s is None else DraftUpdate(loss=1.0, num_updates=1, elapsed_s=elapsed_s),
        )
        for step, elapsed_s in zip(spec.steps, seconds, strict=True)
    )
    return replace(RECORD, arms=(base, replace(spec, steps=steps)))


def test_the_page_says_whether_the_draft_was_trained_and_its_share_of_the_arms_time() -> None:
    page = page_text(trained_record())
    assert "The draft learned beside the policy in 2 of 6 steps" in page
    assert "The draft was fixed during RL." not in page
    assert "The draft was fixed during RL." in page_text(RECORD)
    assert "draft_training" in draw(trained_record())
    assert draft_text(trained_record()) == (
        "The draft learned beside the policy in 2 of 6 steps, which took 1.25 s, 1.6 % of the arm's time."
    )


def kind(sampling: str, generation_s: float, gain: float, length: float) -> SamplingPoint:
    ends = {"generation_p10_s": generation_s - 0.5, "generation_p90_s": generation_s + 0.5}
    measured = {"batch": 64, "num_repeats": 5, "gain": gain, "mean_acceptance_length": length}
    return SamplingPoint(sampling=sampling, generation_s=generation_s, **ends, **measured)


def test_both_kinds_of_drafts_are_shown_with_the_choice_and_only_where_both_were_measured() -> None:
    both = (kind("probabilistic", 3.0, 1.0, 2.5), kind("greedy", 2.5, 1.2, 2.75))
    tuning = replace(TUNING, sampling="greedy", samplings=both)
    assert [(row.label, row.cells, row.kind) for row in sampling_table(tuning).rows] == [
        ("probabilistic", ("64", "3.00", "2.50 to 3.50", "5", "2.50", "1.00x", ""), ""),
        ("greedy", ("64", "2.50", "2.00 to 3.00", "5", "2.75", "1.20x", "chosen"), "chosen"),
    ]
    text = page_text(replace(RECORD, tuning=tuning))
    assert "the arm had greedy ones" in text
    assert f"k = {TUNING.chosen_k}, against probabilistic drafts, measured" in text
    assert f"k = {TUNING.chosen_k}, greedy drafts" in text
    assert "greedy drafts" not in page_text(RECORD)
    certificate = replace(CERTIFICATE, draft_sampling="greedy")
    assert " and greedy drafts on " in page_text(replace(RECORD, certificate=certificate))
