"""The page's part on the draft during RL: its length by running batch, the autopilot, and its training."""

from dataclasses import replace

from slipstream.records.run import RunRecord
from slipstream.records.stages import RunningPoint, SamplingPoint
from slipstream.records.steps import ArmRecord, AutopilotStep, DraftUpdate, ScheduleEntry
from slipstream.report.page import draw
from slipstream.report.sentences import arm_length, autopilot_text, draft_text, schedule_text
from slipstream.report.tables import running_table, sampling_table
from slipstream.simulator.reference import read_reference
from slipstream.types import Arm
from tests.unit.report.handmade import RECORD, TUNING, page_text
from tests.unit.sampled import DECISION

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
    assert "The draft learned beside the policy in 2 of 6 steps, which took 1.25 s, 1.6 % of the arm" in page
    assert "The draft was fixed during RL." not in page
    assert "The draft was fixed during RL." in page_text(RECORD)
    assert "draft_training" in draw(trained_record(), read_reference())
    assert draft_text(trained_record()) == (
        "The draft learned beside the policy in 2 of 6 steps, which took 1.25 s, 1.6 % of the arm's time."
    )
    assert draft_text(RECORD) == ""


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
    assert RECORD.certificate is not None
    certificate = replace(RECORD.certificate, draft_sampling="greedy")
    assert " and greedy drafts on " in page_text(replace(RECORD, certificate=certificate))
