"""Generation beside training, against hand-worked values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.simulator.cost.asynchronous import overlap
from slipstream.simulator.cost.lengths import Lengths, longest_of
from slipstream.simulator.cost.rollout import RolloutShape, Trace, slowest_engine
from slipstream.types import StageTimes

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


@given(st.integers(1, 4), st.floats(0.1, 1.5), st.floats(0.0, 500.0))
def test_a_longer_lag_is_never_slower_and_the_longest_response_ends_in_time(
    lag: int, log_sd: float, train_s: float
) -> None:
    lengths = Lengths(median=50.0, log_sd=log_sd, max_tokens=300.0)
    trainer = replace(TRAINER, data_s=0.0, prepare_s=0.0, logprob_s=0.0, train_s=train_s)
    nearer, farther = (
        overlap(trainer, lengths=lengths, shape=SHAPE, lag=each, seconds=batch_times_ten) for each in (lag - 1, lag)
    )
    assert farther.step.step_s <= nearer.step.step_s + 1e-9
    assert farther.step.generation_s == max(0.0, farther.period_s - train_s)
    # The longest response must end within 1 + lag steps, even on an engine that runs it alone at 1.1 s a token.
    assert (1 + lag) * farther.period_s >= 1.1 * longest_of(lengths, SHAPE.num_rollouts) - 1e-9


def test_equal_responses_are_bound_by_latency() -> None:
    # Four an engine, 100 tokens each, lag 1: r = 4 x 2 = 8 running, a token takes 1.8 s, 180 s over two steps.
    lengths = Lengths(median=100.0, log_sd=0.0, max_tokens=100.0)
    found = overlap(TRAINER, lengths=lengths, shape=SHAPE, lag=1, seconds=batch_times_ten)
    assert found.period_s == pytest.approx(90.0)
    assert found.step.step_s == pytest.approx(90.0)
