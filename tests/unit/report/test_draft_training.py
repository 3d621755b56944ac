"""What the page says of a draft that was trained during RL, by hand from the small record."""

from __future__ import annotations

from dataclasses import replace

from slipstream.records.run import RunRecord
from slipstream.records.steps import DraftDecision, DraftUpdate
from slipstream.report import figures
from slipstream.report.page import draw
from slipstream.report.reference import read_reference
from slipstream.report.summary import DraftTraining, draft_training
from tests.unit.report.handmade import RECORD, page_text

NO = DraftDecision(
    trains=False,
    reason="nothing is lost",
    length=2.4,
    reference_length=2.4,
    generation_s=2.0,
    saved_s=0.0,
    lost_s=0.0,
    cost_s=None,
)
YES = replace(NO, trains=True, reason="it pays", length=2.0, saved_s=6.0, lost_s=1.25, cost_s=0.5)


def _trained_record() -> RunRecord:
    """Of the speculative arm's steps of 52, 5, 5 and 5 s the last two trained the draft, for 0.5 and 0.75 s."""
    base, spec = RECORD.arms
    seconds = (None, None, 0.5, 0.75)
    steps = tuple(
        replace(
            step,
            draft_decision=NO if elapsed_s is None else YES,
            draft_update=None if elapsed_s is None else DraftUpdate(loss=1.0, num_updates=1, elapsed_s=elapsed_s),
        )
        for step, elapsed_s in zip(spec.steps, seconds, strict=True)
    )
    return replace(RECORD, arms=(base, replace(spec, steps=steps)))


def test_what_the_training_took_is_a_share_of_the_arms_time() -> None:
    found = draft_training(_trained_record())
    assert found == DraftTraining(num_steps=4, num_trained=2, elapsed_s=1.25, share=1.25 / 67)
    assert draft_training(RECORD) is None


def test_the_page_says_whether_the_draft_was_trained() -> None:
    reference = read_reference()
    page = page_text(_trained_record())
    assert "The draft learned beside the policy in 2 of 4 steps, which took 1.25 s,\n1.9 % of the arm's time." in page
    assert "The draft was fixed during RL." not in page
    assert "The draft was fixed during RL." in page_text(RECORD)
    assert "draft_training" in draw(_trained_record(), reference)
    assert "draft_training" not in draw(RECORD, reference)


def test_the_figure_shows_acceptance_decisions_and_both_sides() -> None:
    svg = figures.draft_training(_trained_record())
    for words in (
        "draft trained",
        "known to be reached",
        "expected to save",
        "lost since the last",
        "a training costs",
    ):
        assert words in svg
