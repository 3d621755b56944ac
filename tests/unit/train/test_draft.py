"""The draft of an arm from step to step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.drafts.config import DraftOnline
from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import AcceptanceStats, DraftDecision, DraftUpdate, StepRecord
from slipstream.train.loop import Draft, TrainedDraft
from tests.small import draft_with
from tests.unit.sampled import accepted
from tests.unit.train.world import STEP

STALE = draft_with(
    eagle3={"aux_hidden_state_layer_ids": (0, 1, 2)}, online={"when": DraftOnline.WHEN_STALE, "horizon_steps": 8}
)
ALWAYS = draft_with(STALE, online={"when": DraftOnline.ALWAYS})


def drafted(length: float) -> AcceptanceStats:
    """So many drafts of one token that chance moves nothing."""
    return accepted(10**12, round((length - 1) * 10**12))


def generated(length: float, *, generation_s: float = 3.0) -> GenerationResult:
    return GenerationResult(groups=(), acceptance=drafted(length), generation_s=generation_s)


def trained(length: float, *, elapsed_s: float | None = None) -> StepRecord:
    """A step of rollouts of that length, which took 3 s; with `elapsed_s` it trained the draft."""
    update = None if elapsed_s is None else DraftUpdate(loss=1.0, num_updates=1, elapsed_s=elapsed_s)
    return replace(STEP, acceptance=drafted(length), draft_update=update)


def decided(draft: TrainedDraft, length: float, *, num_steps_left: int = 9, generation_s: float = 3.0) -> DraftDecision:
    """After rollouts of that length."""
    decision = draft.decide(generated(length, generation_s=generation_s), num_steps_left=num_steps_left)
    assert decision is not None
    return decision


def test_a_fixed_draft_is_never_trained() -> None:
    draft = Draft(version=3)
    draft.note(trained(1.5, elapsed_s=1.0))
    assert (draft.decide(generated(1.5), num_steps_left=9), draft.version) == (None, 3)


@pytest.mark.parametrize(("num_steps_left", "saved_s"), [(9, 6.0), (8, 6.0), (5, 3.75), (0, 0.0)])
def test_a_training_pays_for_the_horizon_or_for_the_steps_that_are_left(num_steps_left: int, saved_s: float) -> None:
    """A length of 1.5 where 2.0 is known to be reached loses a quarter of each step's 3 s."""
    decision = decided(TrainedDraft(STALE, reference=2.0), 1.5, num_steps_left=num_steps_left)
    assert decision.saved_s == pytest.approx(saved_s, rel=1e-4)
    assert (decision.length, decision.reference_length) == (1.5, 2.0)
    assert decision.trains == (saved_s > 0)


def test_a_draft_that_is_always_trained_shows_what_it_would_have_saved() -> None:
    decision = decided(TrainedDraft(ALWAYS, reference=2.0), 2.0)
    assert (decision.trains, decision.reason) == (True, "always")
    assert decision.saved_s == pytest.approx(0.0, abs=1e-3)
    assert not decided(TrainedDraft(STALE, reference=2.0), 2.0).trains


def test_each_training_makes_the_next_version_and_its_time_is_what_the_next_one_costs() -> None:
    draft = TrainedDraft(STALE, reference=2.0)
    draft.note(trained(1.5))
    assert draft.version == 0
    draft.note(trained(1.5, elapsed_s=9.0))  # the first pays for cold caches
    draft.note(trained(1.5, elapsed_s=7.0))
    assert draft.version == 2
    decision = decided(draft, 1.5)
    assert (decision.trains, decision.cost_s, decision.reason) == (False, 7.0, "it costs more than it saves")


def test_a_resumed_draft_knows_what_the_steps_before_it_showed() -> None:
    """Lengths of 2.0 and 1.5 before, and 1.6 now: 2.0 is reachable, and the last three have 1.7."""
    draft = TrainedDraft(STALE, reference=None, history=[trained(2.0), trained(1.5, elapsed_s=9.0)])
    decision = decided(draft, 1.6)
    assert draft.version == 1
    assert (decision.reference_length, decision.length) == (2.0, pytest.approx(1.7))


def test_a_resumed_draft_decides_as_one_that_was_not_interrupted() -> None:
    """Each step loses a quarter of the seconds that its rollouts took, whatever its record says of other times."""
    whole, records = TrainedDraft(STALE, reference=2.0), []
    for generation_s in (1.0, 3.0, 2.0, 5.0, 0.5):
        decision = decided(whole, 1.5, generation_s=generation_s)
        record = replace(trained(1.5, elapsed_s=1.5 if decision.trains else None), draft_decision=decision)
        records.append(record)
        whole.note(record)
    resumed = TrainedDraft(STALE, reference=2.0, history=records)
    assert decided(resumed, 1.5) == decided(whole, 1.5)
    trains = [record.draft_decision is not None and record.draft_decision.trains for record in records]
    assert trains == [True, True, False, True, False]


def test_a_step_that_decided_nothing_about_its_draft_lost_no_time_that_counts() -> None:
    """Of the rollouts before, which say nothing of their seconds, none; of these a quarter of 3 s."""
    draft = TrainedDraft(STALE, reference=2.0, history=[trained(1.5)])
    assert decided(draft, 1.5).lost_s == pytest.approx(0.75, rel=1e-5)
