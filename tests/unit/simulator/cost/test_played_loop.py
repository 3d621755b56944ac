"""The event-by-event loop against hand-worked runs, and the closed form against it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.simulator.cost import Array
from slipstream.simulator.cost.asynchronous_cost import Bound, overlap
from slipstream.simulator.cost.lengths import Lengths, stratified
from slipstream.simulator.cost.rollout import RolloutShape, Slots, Trace
from slipstream.types import StageTimes
from tests.unit.simulator.cost.played_loop import Loop, step_starts

NUM_STEPS = 30
_CYCLE = 12  # steps: with a lag of n the loop repeats itself every n + 1 steps, a long one after n short ones


def one_second(trace: Trace) -> Array:
    """A token takes 1 s however many run."""
    return trace.tokens_S


def batch_times_twentieth(trace: Trace) -> Array:
    """A token takes 1 s and a twentieth for each running sequence."""
    return trace.tokens_S * (1.0 + 0.05 * trace.batch_S)


def loop(lag: int = 1, busy_s: float = 4.0, refit_s: float = 0.0, **more: int | Slots) -> Loop:
    return Loop(lag=lag, busy_s=busy_s, refit_s=refit_s, prompt_tokens=0.0, **more)  # type: ignore[arg-type]


def trainer(busy_s: float) -> StageTimes:
    return StageTimes.in_sequence(data_s=0.0, prepare_s=0.0, generation_s=0.0, logprob_s=0.0, train_s=busy_s)


def equal(num_batches: int, prompts: int, group_size: int, tokens: float) -> list[Array]:
    return [np.full((prompts, group_size), tokens)] * num_batches


def drawn(lengths: Lengths, shape: RolloutShape, num_batches: int) -> list[Array]:
    """Typical responses of one engine in groups, in another order each step."""
    random = np.random.default_rng(0)
    tokens_B = stratified(lengths, shape.per_engine, longest_of_count=shape.num_rollouts)
    return [random.permutation(tokens_B).reshape(-1, shape.group_size) for _ in range(num_batches)]


def period_s(starts: Array) -> float:
    """Mean of the last steps, of whole cycles."""
    return float((starts[-1] - starts[-1 - _CYCLE]) / _CYCLE)


def test_a_slow_trainer_never_waits_after_its_first_batch() -> None:
    # Both batches of version 0 are there after 3 s; from then on a batch is ready long before it is due.
    starts = step_starts(equal(5, 2, 2, 3.0), loop(busy_s=10.0), one_second)
    assert starts.tolist() == [3.0, 13.0, 23.0, 33.0]


def test_the_refit_stops_both() -> None:
    starts = step_starts(equal(5, 2, 2, 3.0), loop(busy_s=10.0, refit_s=1.0), one_second)
    assert starts.tolist() == [3.0, 14.0, 25.0, 36.0]


def test_a_batch_starts_when_weights_are_published_and_the_trainer_waits_for_it() -> None:
    # 10 tokens. Batches 0 and 1 end at 10. Step 0 trains to 14: batch 2 runs to 24. Step 1 trains from 14 to 18:
    # batch 3 runs to 28. Step 2 begins at 24 and ends at 28, step 3 begins at 28: two steps in 14 s.
    starts = step_starts(equal(7, 1, 2, 10.0), loop(), one_second)
    assert starts.tolist() == [10.0, 14.0, 24.0, 28.0, 38.0, 42.0]
    # The closed form: (10 + 4) / 2 s a step.
    assert period_s(step_starts(equal(NUM_STEPS, 1, 2, 10.0), loop(), one_second)) == 7.0


def test_with_slots_by_the_group_one_long_response_holds_up_the_next_group() -> None:
    # One prompt, lag 1: a single group runs at a time, although two may be under way.
    batches = [np.array([[2.0, 10.0]])] * NUM_STEPS
    assert period_s(step_starts(batches, loop(), one_second)) == 7.0
    assert period_s(step_starts(batches, loop(slots=Slots.GROUP), one_second)) == 10.0


def test_memory_for_one_sequence_runs_them_one_after_another() -> None:
    found = period_s(step_starts(equal(NUM_STEPS, 1, 3, 10.0), loop(max_running=1), one_second))
    assert found == 30.0


@settings(max_examples=20)
@given(
    lag=st.integers(1, 3),
    busy_s=st.floats(0.0, 400.0),
    log_sd=st.floats(0.0, 1.0),
    slots=st.sampled_from(Slots),
    cap=st.sampled_from((3, 6, 1000)),
)
def test_the_closed_form_meets_the_loop_played_through(
    lag: int, busy_s: float, log_sd: float, slots: Slots, cap: int
) -> None:
    lengths = Lengths(median=60.0, log_sd=log_sd, max_tokens=300.0)
    context = lengths.mean_square_tokens / (2 * lengths.mean_tokens)
    shape = RolloutShape(
        num_rollouts=16, num_engines=1, prompt_tokens=0.0, group_size=4, slots=slots, cache_tokens=cap * context
    )
    closed = overlap(trainer(busy_s), lengths=lengths, shape=shape, lag=lag, seconds=batch_times_twentieth)
    play = loop(lag=lag, busy_s=busy_s, slots=slots, max_running=cap)
    played_s = period_s(step_starts(drawn(lengths, shape, NUM_STEPS + lag), play, batch_times_twentieth))
    assert closed.step.step_s == pytest.approx(played_s, rel=0.2)


@pytest.mark.parametrize(
    ("lag", "slots", "bound"),
    [
        (1, Slots.RESPONSE, Bound.LAG),
        (1, Slots.GROUP, Bound.GROUPS),
        (2, Slots.RESPONSE, Bound.LAG),
        (2, Slots.GROUP, Bound.LAG),
        (3, Slots.RESPONSE, Bound.LAG),
    ],
)
@pytest.mark.parametrize("busy_s", [0.0, 50.0, 150.0])
def test_the_closed_form_is_at_most_a_tenth_faster_than_the_loop_played_through(
    lag: int, slots: Slots, bound: Bound, busy_s: float
) -> None:
    # Batches that start together end together: the loop bunches its steps, which the closed form does not know.
    lengths = Lengths(median=60.0, log_sd=0.8, max_tokens=300.0)
    shape = RolloutShape(num_rollouts=64, num_engines=1, prompt_tokens=0.0, group_size=8, slots=slots)
    closed = overlap(trainer(busy_s), lengths=lengths, shape=shape, lag=lag, seconds=batch_times_twentieth)
    play = loop(lag=lag, busy_s=busy_s, slots=slots)
    played_s = period_s(step_starts(drawn(lengths, shape, NUM_STEPS), play, batch_times_twentieth))
    assert closed.bound is bound
    assert 0.89 * played_s <= closed.step.step_s <= 1.02 * played_s
