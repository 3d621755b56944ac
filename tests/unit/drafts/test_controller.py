"""Whether to train the draft: the inequality by hand, and what holds for every series of acceptance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.drafts.controller import PATIENCE, REST, WINDOW, Span, Staleness
from slipstream.records.steps import AcceptanceStats, DraftDecision

GENERATION_S = 10.0
NUM_DRAFTS = 1_000_000  # so many that chance explains next to nothing
LENGTHS = st.floats(1.0, 4.0)
SERIES = st.lists(st.tuples(LENGTHS, st.none() | st.floats(0.01, 10.0)), max_size=30)


def accepted(length: float, num_drafts: int = NUM_DRAFTS) -> AcceptanceStats:
    """Drafts of three tokens that are accepted whole or not at all, of this mean length."""
    whole = round((length - 1.0) / 3.0 * num_drafts)
    return AcceptanceStats(
        num_drafts=num_drafts,
        num_draft_tokens=3 * num_drafts,
        num_accepted_tokens=3 * whole,
        accepted_by_position=(whole,) * 3,
        mean_acceptance_length=1.0 + 3 * whole / num_drafts,
        acceptance_rate=whole / num_drafts,
        rate_by_position=(whole / num_drafts,) * 3,
    )


def seen(state: Staleness, *lengths: float) -> Staleness:
    """After steps of these lengths."""
    for length in lengths:
        state = state.observed(accepted(length), GENERATION_S)
    return state


def after(*lengths: float, reference: float | None = None) -> Staleness:
    return seen(Staleness(reference=reference), *lengths)


def decided(state: Staleness, *, generation_s: float = GENERATION_S, horizon_steps: int = 8) -> DraftDecision:
    return state.decide(generation_s=generation_s, horizon_steps=horizon_steps)


def step(state: Staleness, length: float, cost_s: float = 1.0) -> tuple[Staleness, DraftDecision]:
    """One step of a run that does what is decided."""
    state = seen(state, length)
    decision = decided(state)
    return (state.trained(cost_s) if decision.trains else state), decision


def test_what_is_behind_a_decision_by_hand() -> None:
    # At 4 instead of 3 a quarter of the verify iterations would go, of 10 s in each of 8 steps.
    state = after(4.0, 4.0, 4.0, 3.0, 3.0, 3.0)
    # Of the last three steps the lengths of three each have a mean of 11/3, 10/3 and 3.
    assert state.lost_s == pytest.approx(10.0 * (1 / 12 + 1 / 6 + 1 / 4), rel=0.01)
    state = replace(state, costs_s=(1.0, 4.0, 2.0), is_warm=True)
    decision = decided(state)
    assert (decision.trains, decision.reason, decision.cost_s) == (True, "it pays", 2.0)
    assert (decision.length, decision.reference_length) == pytest.approx((3.0, 4.0), abs=1e-5)
    assert (decision.generation_s, decision.lost_s) == (10.0, state.lost_s)
    assert decision.saved_s == pytest.approx(20.0, rel=0.01)
    assert decided(state, horizon_steps=4).saved_s == pytest.approx(10.0, rel=0.01)
    for cost_s, reason in (
        (6.0, "less was lost since the last ones than one costs"),
        (30.0, "it costs more than it saves"),
    ):
        decision = decided(replace(state, costs_s=(cost_s,)))
        assert (decision.trains, decision.reason) == (False, reason)


def test_a_training_takes_its_cost_off_what_was_lost_and_leaves_no_more_than_one_more() -> None:
    state = replace(after(3.0), costs_s=(2.0,), is_warm=True)
    for lost_s, left_s in ((1.5, 0.0), (2.0, 0.0), (3.5, 1.5), (4.0, 2.0), (9.0, 2.0)):
        assert replace(state, lost_s=lost_s).trained(2.0).lost_s == left_s
    assert replace(state, lost_s=9.0).trained(2.0).held == state.length
    assert Staleness(lost_s=9.0).trained(2.0).lost_s == 0.0  # what it costs is not known


def test_a_loss_that_stands_is_trained_for_as_often_as_it_comes_to_what_a_training_costs() -> None:
    """Of 10 s a step a little over a quarter is lost: a training's 10 s in four steps.

    The first two trainings come before the cost is known.
    """
    state, trained_at = after(reference=4.0), []
    for number in range(20):
        state, decision = step(state, 2.98, cost_s=10.0)
        trained_at += [number] if decision.trains else []
    assert trained_at == [0, 1, 5, 9, 13, 17]


def test_a_fall_below_the_length_at_the_last_training_is_answered_at_once() -> None:
    state = replace(after(3.0, reference=4.0), costs_s=(10.0,), is_warm=True).trained(10.0)
    assert not decided(seen(state, 3.0)).trains
    assert not decided(seen(state, 3.1)).trains
    fallen = replace(seen(state, 2.8), lost_s=0.0)
    assert decided(fallen).trains
    assert not decided(replace(fallen, held=fallen.length)).trains
    assert fallen.length == pytest.approx(2.9, abs=1e-5)
    within_noise = replace(state, recent=(), lost_s=0.0).observed(accepted(2.8, num_drafts=100), GENERATION_S)
    assert within_noise.noise > 0.2
    assert not decided(replace(within_noise, lost_s=0.0)).trains


def test_the_second_training_tells_what_one_costs_for_the_first_finds_caches_cold() -> None:
    state = after(4.0, 4.0, 4.0, 3.0)
    for known in (state, state.trained(1000.0)):
        decision = decided(known)
        assert (decision.trains, decision.cost_s, decision.reason) == (True, None, "its cost is not known yet")
    assert decided(state.trained(1000.0).trained(2.0)).cost_s == 2.0


def test_a_draft_that_is_as_good_as_ever_is_left_alone() -> None:
    decision = decided(after(3.0, 3.0, 3.0))
    assert (decision.trains, decision.saved_s, decision.reason) == (False, 0.0, "nothing is lost")


def test_what_the_draft_reached_before_rl_is_a_reference() -> None:
    assert decided(after(1.05, reference=3.5)).trains
    assert not decided(after(1.05)).trains


def test_a_fall_that_chance_explains_is_none() -> None:
    """100 drafts, half accepted whole: a standard error of 3 x 0.5 / 10 = 0.15 tokens, twice of which is 0.3."""
    state = Staleness(reference=2.79).observed(accepted(2.5, num_drafts=100), GENERATION_S)
    assert state.noise == pytest.approx(0.3)
    assert not decided(state).trains
    assert decided(replace(state, reference=2.81)).trains


def test_steps_in_which_nothing_was_drafted_tell_nothing() -> None:
    state = after(4.0, 3.0)
    assert state.observed(None, 9.0) == state == state.observed(replace(accepted(1.0), num_drafts=0), 9.0)
    assert not decided(Staleness()).trains


def test_without_steps_left_nothing_pays() -> None:
    assert not decided(after(4.0, 1.0), horizon_steps=0).trains


def paused(*lengths: float) -> Staleness:
    """A draft that reached 4, fell to 3, and was trained `PATIENCE` times without a gain; then stood at `lengths`."""
    state = after(4.0, 3.0, 3.0, 3.0)
    for _ in range(PATIENCE):
        state = seen(state.trained(1.0), 3.0)
    return seen(state, *lengths)


def test_trainings_without_a_gain_are_followed_by_a_pause() -> None:
    state = after(4.0, 3.0, 3.0, 3.0)
    for _ in range(PATIENCE):
        assert decided(state).reason in ("it pays", "its cost is not known yet")
        state = seen(state.trained(1.0), 3.0)
    decision = decided(state)
    assert (decision.trains, decision.reason) == (False, "a pause shows what training is worth")
    assert decision.saved_s > (decision.cost_s or 0.0)


@pytest.mark.parametrize(
    ("num_steps", "length", "pace"), [(2, 3.0, 0.5), (1, 3.0, 1.0), (0, 3.5, 0.5), (4, 4.0, 0.0), (4, 4.5, 0.0)]
)
def test_the_pace_of_a_fall_is_by_how_much_it_fell_a_step(num_steps: int, length: float, pace: float) -> None:
    assert Span(length=4.0, num_steps=num_steps).pace_to(length) == pace


def test_before_the_first_step_a_draft_is_as_good_as_none() -> None:
    assert (Staleness().length, Staleness().noise) == (1.0, 0.0)
    decision = decided(Staleness())
    assert (decision.trains, decision.saved_s, decision.cost_s, decision.reference_length) == (False, 0.0, None, 1.0)
    assert decision.reason == "nothing is lost"


def test_a_step_without_drafts_does_not_lengthen_a_pause() -> None:
    span = Span(length=3.0, pace=1.0)
    state = replace(after(3.0), pause=span, idle=span)
    silent, after_drafts = state.observed(None, 9.0), seen(state, 2.9)
    assert (silent.pause, silent.idle) == (span, span)
    assert (after_drafts.pause, after_drafts.idle) == (replace(span, num_steps=1), replace(span, num_steps=1))


@pytest.mark.parametrize(
    ("num_steps", "length", "is_over", "patience", "reference"),
    [
        # It fell by 0.1 a step before: of 1.5 times that, two steps make 0.3 and three 0.45.
        (2, 2.65, True, PATIENCE, 4.0),  # by 0.35: it was held up
        (2, 2.75, False, PATIENCE, 4.0),  # by 0.25: nobody knows yet
        (3, 2.5, True, PATIENCE, 4.0),
        (3, 2.6, True, PATIENCE // 2, 4.0),  # as before
        (3, 3.01, True, PATIENCE // 2, 3.01),  # it stood, so more cannot be reached
    ],
)
def test_a_pause_ends_with_a_faster_fall_or_after_its_last_step(
    num_steps: int, length: float, is_over: bool, patience: int, reference: float
) -> None:
    pause = Span(length=3.0, pace=0.1, num_steps=num_steps - 1)
    state = seen(Staleness(reference=4.0, lowest=3.2, num_idle=PATIENCE, pause=pause), length)
    assert (state.pause is None, state.patience) == (is_over, patience)
    assert (state.num_idle, state.reference) == (0 if is_over else PATIENCE, pytest.approx(reference, abs=1e-5))
    assert state.lowest == pytest.approx(length, abs=1e-5)


def test_the_last_trainings_alone_tell_the_cost_and_a_pause_begins_once() -> None:
    """Of eight trainings the first finds caches cold, and the last five count: 5, 6, 7, 8 and 9 s."""
    state = replace(after(4.0, 3.0), patience=6)
    for cost_s in (100.0, 3.0, 4.0, 5.0, 6.0, 7.0):
        state = state.trained(cost_s)
    began = state.pause
    state = state.trained(8.0).trained(9.0)
    assert state.costs_s == (5.0, 6.0, 7.0, 8.0, 9.0)
    assert decided(state).cost_s == 7.0
    assert began is not None and state.pause == began
    assert began.length == pytest.approx(3.5, abs=1e-5)


def test_the_pace_before_a_pause_is_that_since_the_first_training_without_a_gain() -> None:
    """From 4 to 3.1, the mean of the last three, in the five steps between six trainings."""
    state = replace(after(4.0, 4.0, 4.0, reference=9.0), patience=6).trained(1.0)
    for length in (3.9, 3.6, 3.3, 3.0, 3.0):
        state = seen(state, length).trained(1.0)
    assert state.pause is not None
    assert (state.pause.length, state.pause.pace) == pytest.approx((3.1, 0.9 / 5), abs=1e-4)
    assert state.pause.num_steps == 0


def test_a_draft_that_its_training_held_up_goes_on_being_trained() -> None:
    state = paused(2.5)
    assert decided(state).trains
    assert (state.patience, state.num_idle, state.pause) == (PATIENCE, 0, None)
    assert state.reference == pytest.approx(4.0)


def test_a_draft_that_was_held_up_is_given_its_whole_patience_again() -> None:
    state = seen(replace(paused(), patience=PATIENCE // 2), 2.5)
    assert (state.patience, state.pause) == (PATIENCE, None)


def test_a_length_as_good_as_ever_clears_what_was_held_against_the_trainings() -> None:
    state = after(3.0).trained(1.0)
    assert (state.num_idle, state.idle) == (1, Span(length=state.length))
    state = seen(state, 3.0)
    assert (state.num_idle, state.idle, state.pause, state.lowest) == (0, None, None, state.length)


def test_a_length_that_a_pause_leaves_as_it_is_is_all_that_the_draft_can_reach() -> None:
    assert decided(paused(3.0)).reason == "a pause shows what training is worth"
    state = paused(3.0, 3.0)  # the step after the last training is the first of the pause
    assert decided(state).reason == "the last trainings gained nothing"
    assert (state.patience, state.reference) == (PATIENCE // 2, pytest.approx(3.0))
    assert decided(seen(state, 2.0)).trains


def test_after_a_rest_training_tries_again_for_the_greatest_length_and_the_next_rest_is_twice_as_long() -> None:
    state, trained_at = after(4.0, 4.0, 4.0), []
    for number in range(142):
        state, decision = step(state, 3.0)
        trained_at += [number] if decision.trains else []
    first = 0
    for rest in (REST, 2 * REST, 4 * REST, 8 * REST):
        assert trained_at[:PATIENCE] == [*range(first, first + PATIENCE)]
        trained_at = trained_at[PATIENCE:]
        first += PATIENCE + WINDOW - 1 + rest  # the last step of a pause is the first of a rest
    assert not trained_at
    assert (state.rest, state.num_rested) == (8 * REST, 1)
    assert (state.reference, state.greatest) == pytest.approx((3.0, 4.0), abs=1e-5)


def test_a_rest_that_ends_lowers_no_length_that_was_reached_since() -> None:
    state = replace(after(2.5), greatest=3.0, reference=2.5, num_rested=REST - 1, rest=REST)
    assert seen(state, 2.5).reference == 3.0
    assert (seen(state, 2.5).num_rested, seen(state, 2.5).rest) == (None, 2 * REST)
    assert seen(replace(state, patience=1, lowest=2.5), 2.4).patience == PATIENCE
    risen = seen(replace(state, recent=()), 3.5)
    assert (risen.reference, risen.num_rested) == (pytest.approx(3.5, abs=1e-5), None)
    assert not decided(risen).trains


def test_a_training_that_a_fall_calls_for_leaves_the_rest_as_it_is() -> None:
    state = replace(paused(3.0, 3.0), num_rested=3)
    falling = seen(state, 2.0)
    assert decided(falling).trains
    assert (falling.num_rested, falling.trained(1.0).num_rested) == (4, 4)
    pause = Span(length=2.5, num_steps=WINDOW - 1)
    given_up_again = seen(replace(falling, pause=pause, recent=()), 2.5)
    assert (given_up_again.num_rested, given_up_again.greatest) == (5, pytest.approx(4.0, abs=1e-5))


def test_a_fall_that_goes_on_as_before_halves_the_patience() -> None:
    """By 0.1 a step, with trainings and without."""
    lengths = [4.0 - 0.1 * step for step in range(30)]
    state, trained_at = Staleness(), []
    for number, length in enumerate(lengths):
        state, decision = step(state, length, cost_s=0.01)
        trained_at += [number] if decision.trains else []
    # Twelve steps with training, then up to three without and six with it in turn.
    assert trained_at == [*range(1, 13), *range(15, 21), *range(23, 29)]
    assert state.reference == pytest.approx(4.0)


def test_a_measured_gain_restores_the_patience() -> None:
    state = seen(paused(3.0, 3.0), 2.0).trained(1.0)
    assert state.patience == PATIENCE // 2
    assert seen(state, 3.9).patience == PATIENCE


@given(length=LENGTHS, reference=LENGTHS, num_steps=st.integers(PATIENCE + 1, 60))
def test_a_draft_that_cannot_gain_is_trained_no_more_than_it_takes_to_see_that(
    length: float, reference: float, num_steps: int
) -> None:
    """Whatever is believed of it: its acceptance stays the same. Each time it is tried again after twice as long."""
    state, num_trainings = Staleness(reference=reference), 0
    for _ in range(num_steps):
        state, decision = step(state, length)
        num_trainings += decision.trains
    assert num_trainings <= PATIENCE * (1 + int(math.log2(1 + num_steps / REST)))
    if num_steps <= PATIENCE + REST:
        assert num_trainings <= PATIENCE
    if reference <= accepted(length).mean_acceptance_length:
        assert num_trainings == 0


@given(start=st.floats(2.0, 4.0), pace=st.floats(0.02, 0.3), num_steps=st.integers(1, 80))
def test_a_draft_that_falls_alike_with_training_and_without_is_not_trained_all_the_time(
    start: float, pace: float, num_steps: int
) -> None:
    state, num_trainings = Staleness(), 0
    for number in range(num_steps):
        state, decision = step(state, max(1.0, start - pace * number), cost_s=0.0)
        num_trainings += decision.trains
    assert num_trainings <= PATIENCE + PATIENCE // 2 * (num_steps // (PATIENCE // 2 + WINDOW - 1) + 1)


@given(pace=st.floats(0.05, 0.5), level=st.floats(1.5, 3.5), num_steps=st.integers(20, 80))
def test_what_training_holds_up_is_trained_for_as_long_as_the_policy_moves(
    pace: float, level: float, num_steps: int
) -> None:
    """Without a training the length falls by `pace` in the next step; with one it stays."""
    state, length, num_trainings = after(4.0, 4.0, 4.0), level, 0
    for _ in range(num_steps):
        state, decision = step(state, length, cost_s=0.0)
        num_trainings += decision.trains
        length = length if decision.trains else max(1.0, length - pace)
        if length == 1.0:
            return  # nothing is left to hold up
    assert num_trainings >= num_steps * PATIENCE // (PATIENCE + WINDOW) - PATIENCE
    assert state.reference == pytest.approx(4.0)


@given(low=st.floats(1.5, 3.0), gain=st.floats(0.02, 0.3), num_still=st.integers(0, 40))
def test_a_draft_that_could_not_follow_comes_back_once_the_policy_stands_still(
    low: float, gain: float, num_still: int
) -> None:
    """No training helps for a time; from then on each brings `gain`, up to the length before."""
    state, length = after(4.0, 4.0, 4.0), low
    for number in range(num_still + 8 * REST + 120):
        state, decision = step(state, length, cost_s=0.0)
        if number >= num_still and decision.trains:
            length = min(4.0, length + gain)
    assert length > 3.9


@given(lengths=st.lists(LENGTHS, min_size=1, max_size=30))
def test_a_draft_that_only_rises_is_never_trained(lengths: list[float]) -> None:
    state = Staleness()
    for length in sorted(lengths):
        state, decision = step(state, length)
        assert not decision.trains


@given(before=SERIES, level=st.floats(1.5, 4.0), share=st.floats(0.0, 0.7), cost_s=st.floats(0.01, 10.0))
def test_a_collapse_is_answered_within_the_window(
    before: list[tuple[float, float | None]], level: float, share: float, cost_s: float
) -> None:
    """Whatever came before: once the draft held a level, a lasting fall by 30 % or more trains it."""
    state = Staleness()
    for length, training_s in before:
        state = seen(state, length)
        state = state if training_s is None else state.trained(training_s)
    for _ in range(WINDOW):
        state = seen(state, level)
    for _ in range(5):
        state = state.trained(cost_s)  # what a training costs now
    low = 1.0 + (level - 1.0) * share
    decisions = []
    for _ in range(WINDOW):
        state, decision = step(state, low, cost_s)
        decisions.append(decision)
    saves = 8 * 10.0 * (1.0 - low / level)
    if saves > 1.05 * cost_s:
        assert any(decision.trains for decision in decisions)


@given(series=SERIES, generation_s=st.floats(0.0, 100.0), horizon_steps=st.integers(0, 20))
def test_a_draft_is_trained_exactly_where_it_pays_and_is_due(
    series: list[tuple[float, float | None]], generation_s: float, horizon_steps: int
) -> None:
    def run() -> list[tuple[Staleness, DraftDecision]]:
        state, decisions = Staleness(), []
        for length, training_s in series:
            state = state.observed(accepted(length), generation_s)
            decisions.append((state, decided(state, generation_s=generation_s, horizon_steps=horizon_steps)))
            state = state if training_s is None else state.trained(training_s)
        return decisions

    decisions = run()
    assert run() == decisions
    for state, decision in decisions:
        cost_s = decision.cost_s or 0.0
        is_due = decision.lost_s >= cost_s or state.length < state.held - state.noise
        assert decision.trains == (decision.saved_s > cost_s and is_due and state.pause is None)
        assert 0.0 <= decision.saved_s <= horizon_steps * generation_s
        assert 0.0 <= decision.lost_s <= len(series) * generation_s
        assert 1.0 <= decision.length <= decision.reference_length


@given(
    lengths=st.lists(LENGTHS, max_size=40), cost_s=st.floats(0.5, 50.0), falls=st.booleans(), start=st.floats(2.0, 4.0)
)
def test_trainings_but_for_falls_take_no_more_than_was_lost_for_want_of_them(
    lengths: list[float], cost_s: float, falls: bool, start: float
) -> None:
    state = replace(after(start), costs_s=(cost_s,), is_warm=True)
    lost_s = spent_s = 0.0
    for length in lengths if falls else sorted(lengths):
        state = seen(state, length)
        lost_s += GENERATION_S * state.lost
        decision = decided(state)
        has_fallen = state.length < state.held - state.noise
        spent_s += cost_s if decision.trains and not has_fallen else 0.0
        state = state.trained(cost_s) if decision.trains else state
    assert spent_s <= lost_s + 1e-6
