"""Generation beside training, against hand-worked values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.simulator.cost.asynchronous_cost import Bound, overlap
from slipstream.simulator.cost.lengths import Lengths, longest_of
from slipstream.simulator.cost.rollout import RolloutShape, Slots, Trace, slowest_engine
from slipstream.types import LoopMode, StageTimes

TRAINER = StageTimes.in_sequence(data_s=1.0, prepare_s=2.0, generation_s=0.0, logprob_s=3.0, train_s=4.0)
SHAPE = RolloutShape(num_rollouts=8, num_engines=2, prompt_tokens=10.0)


def batch_times_ten(trace: Trace) -> np.ndarray:
    """A token takes 1 s and a tenth for each running sequence."""
    return trace.tokens_S * (1.0 + 0.1 * trace.batch_S)


def test_a_lag_of_0_waits_for_the_whole_batch() -> None:
    lengths = Lengths(median=50.0, log_sd=0.8, max_tokens=300.0)
    found = overlap(TRAINER, lengths=lengths, shape=SHAPE, lag=0, seconds=batch_times_ten)
    synchronous_s = float(batch_times_ten(slowest_engine(lengths, SHAPE)).sum())
    assert found.step.generation_s == synchronous_s
    assert found.step.step_s == pytest.approx(10.0 + synchronous_s)


@given(st.integers(1, 4), st.floats(0.1, 1.5), st.floats(0.0, 500.0), st.sampled_from(Slots))
def test_a_longer_lag_is_never_slower_and_the_longest_response_ends_in_its_window(
    lag: int, log_sd: float, train_s: float, slots: Slots
) -> None:
    lengths = Lengths(median=50.0, log_sd=log_sd, max_tokens=300.0)
    shape = replace(SHAPE, slots=slots, group_size=4)
    trainer = replace(TRAINER, data_s=0.0, prepare_s=0.0, logprob_s=0.0, train_s=train_s)
    nearer, farther = (
        overlap(trainer, lengths=lengths, shape=shape, lag=each, seconds=batch_times_ten) for each in (lag - 1, lag)
    )
    assert farther.step.step_s <= nearer.step.step_s * (1 + 1e-3)
    # The longest response must end in time, even on an engine that runs it alone at 1.1 s a token.
    window_s = (1 + lag) * farther.step.step_s - train_s
    assert window_s >= 1.1 * longest_of(lengths, SHAPE.num_rollouts) - 1e-9


@given(st.integers(1, 3), st.floats(0.0, 300.0), st.floats(1.0, 500.0), st.sampled_from(LoopMode))
def test_less_key_value_memory_is_never_faster(lag: int, train_s: float, tokens: float, mode: LoopMode) -> None:
    lengths = Lengths(median=50.0, log_sd=0.8, max_tokens=300.0)
    trainer = replace(TRAINER, train_s=train_s)
    less, more = (
        overlap(
            trainer,
            lengths=lengths,
            shape=replace(SHAPE, cache_tokens=cache),
            lag=lag,
            seconds=batch_times_ten,
            mode=mode,
        )
        for cache in (tokens, 2.0 * tokens)
    )
    assert less.step.step_s >= more.step.step_s * (1 - 1e-3)


@given(st.integers(1, 3), st.floats(0.0, 300.0), st.integers(2, 4))
def test_room_by_the_group_is_never_faster_than_by_the_response(lag: int, train_s: float, group_size: int) -> None:
    lengths = Lengths(median=50.0, log_sd=0.8, max_tokens=300.0)
    trainer = replace(TRAINER, train_s=train_s)
    group, response = (
        overlap(
            trainer,
            lengths=lengths,
            shape=replace(SHAPE, slots=slots, group_size=group_size),
            lag=lag,
            seconds=batch_times_ten,
        )
        for slots in (Slots.GROUP, Slots.RESPONSE)
    )
    assert group.step.step_s >= response.step.step_s * (1 - 1e-3)


def test_equal_responses_are_bound_by_the_lag() -> None:
    # Four an engine of 100 tokens, lag 1, no trainer: 8 run, a token takes 1.8 s, 180 s over two steps.
    lengths = Lengths(median=100.0, log_sd=0.0, max_tokens=100.0)
    found = overlap(TRAINER, lengths=lengths, shape=SHAPE, lag=1, seconds=batch_times_ten)
    assert found.period_s == pytest.approx(90.0)
    # Beside a trainer of 8 s: 400 (1 + r / 10) / r = (100 (1 + r / 10) + 8) / 2 at r = 7.653, where it takes 92.27 s.
    assert found.step.generation_s == pytest.approx(92.27 - 8.0, abs=0.02)
    assert found.step.step_s == pytest.approx(92.27 + 2.0, abs=0.02)  # nothing hides the refit
    assert found.bound is Bound.LAG


def test_a_drained_batch_ahead_is_hidden_behind_the_trainer_but_not_the_refit() -> None:
    # Four of 100 tokens at 1.4 s: 140 s, beside 8 s of trainer and 2 s of refit.
    lengths = Lengths(median=100.0, log_sd=0.0, max_tokens=100.0)
    mode = LoopMode.ONE_STEP_OFF
    for lag in (1, 3):
        found = overlap(TRAINER, lengths=lengths, shape=SHAPE, lag=lag, seconds=batch_times_ten, mode=mode)
        assert (found.step.step_s, found.step.generation_s) == (pytest.approx(142.0), pytest.approx(132.0))
        assert found.bound is Bound.DRAINED
    slow = replace(TRAINER, train_s=200.0)
    hidden = overlap(slow, lengths=lengths, shape=SHAPE, lag=1, seconds=batch_times_ten, mode=mode)
    assert (hidden.step.generation_s, hidden.bound) == (0.0, Bound.LEARNER)
    assert hidden.step.step_s == slow.other_s


def test_memory_for_two_sequences_runs_two() -> None:
    # Mean context of equal responses: 10 of the prompt and 50. Two run: 400 tokens at 1.2 s, two at a time.
    lengths = Lengths(median=100.0, log_sd=0.0, max_tokens=100.0)
    shape = replace(SHAPE, cache_tokens=120.0)
    found = overlap(TRAINER, lengths=lengths, shape=shape, lag=1, seconds=batch_times_ten)
    assert found.bound is Bound.MEMORY
    assert found.period_s == pytest.approx(240.0)
