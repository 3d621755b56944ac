"""Continuous batching, response lengths, acceptance and steps, against hand-worked values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.sim.acceptance import AcceptanceProfile, acceptance_length, conditional_rates, fit_profile
from slipstream.sim.asynchronous import overlap
from slipstream.sim.lengths import (
    Lengths,
    LongTailed,
    log_sd_of_truncation,
    long_tailed_with_mean,
    longest_of,
    mean_tokens,
    observed,
    stratified,
)
from slipstream.sim.paper import WORKLOADS, paper_lengths
from slipstream.sim.rollout import RolloutShape, Trace, batch_continuously, slowest_engine
from slipstream.sim.solver import Problem, minimise
from slipstream.sim.step import Step, amdahl, exposed_generation_s

from slipstream.config import ConfigError

TRAINER = Step(data_s=1.0, prepare_s=2.0, generation_s=0.0, logprob_s=3.0, train_s=4.0)
SHAPE = RolloutShape(num_rollouts=8, num_engines=2, prompt_tokens=10.0)


def batch_times_ten(trace: Trace) -> np.ndarray:
    """A token takes 1 s and a tenth for each running sequence."""
    return trace.tokens_S * (1.0 + 0.1 * trace.batch_S)


def test_the_running_batch_shrinks_to_the_longest() -> None:
    trace = batch_continuously(np.array([2.0, 5.0, 5.0]), prompt_tokens=10.0, max_running=8)
    assert trace.tokens_S.tolist() == [2.0, 3.0]
    assert trace.batch_S.tolist() == [3.0, 2.0]
    # Three sequences half-way to token 2, then two half-way from 2 to 5.
    assert trace.context_S.tolist() == [3 * 11.0, 2 * 13.5]


def test_a_waiting_sequence_starts_when_a_slot_is_free() -> None:
    trace = batch_continuously(np.array([3.0, 3.0, 3.0]), prompt_tokens=0.0, max_running=2)
    assert trace.tokens_S.tolist() == [3.0, 3.0]
    assert trace.batch_S.tolist() == [2.0, 1.0]
    assert trace.context_S.tolist() == [3.0, 1.5]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 70))
def test_batching_loses_no_token_and_never_exceeds_the_slots(lengths: list[int], slots: int) -> None:
    trace = batch_continuously(np.sort(np.array(lengths, dtype=float)), prompt_tokens=5.0, max_running=slots)
    assert trace.generated_tokens == pytest.approx(sum(lengths))
    assert trace.largest_batch <= slots
    assert trace.batch_S.min() >= 1
    # Each running sequence has at least its prompt and at most its whole response in the cache.
    assert np.all(trace.context_S >= 5.0 * trace.batch_S)
    assert np.all(trace.context_S <= (5.0 + max(lengths)) * trace.batch_S)


def test_more_engines_share_the_work_but_not_the_tail() -> None:
    lengths = LongTailed(median=100.0, log_sd=1.0, max_tokens=5000.0)
    few, many = (
        slowest_engine(lengths, RolloutShape(num_rollouts=256, num_engines=engines, prompt_tokens=0.0))
        for engines in (2, 32)
    )
    assert many.largest_batch == 8
    assert few.largest_batch == 128
    assert many.tokens_S.sum() == pytest.approx(few.tokens_S.sum())  # both wait for the longest of all 256


def test_the_longest_of_one_is_the_median() -> None:
    lengths = LongTailed(median=100.0, log_sd=0.5, max_tokens=1e6)
    assert longest_of(lengths, 1) == pytest.approx(100.0, rel=1e-3)
    # Half of all pairs lie below level sqrt(1/2) = 0.7071, where the normal quantile is 0.5450.
    assert longest_of(lengths, 2) == pytest.approx(100.0 * np.exp(0.5 * 0.5450), rel=1e-3)


def test_truncation_keeps_the_mean_that_was_asked_for() -> None:
    lengths = long_tailed_with_mean(mean=600.0, log_sd=1.0, max_tokens=1000.0)
    assert mean_tokens(lengths) == pytest.approx(600.0, rel=1e-4)
    assert longest_of(lengths, 10_000) == 1000.0


def test_the_truncated_share_gives_the_spread_back() -> None:
    lengths = long_tailed_with_mean(mean=70.0, log_sd=0.45, max_tokens=160.0)
    share = float(np.mean(stratified(lengths, 100_000, longest_of_count=100_000) >= 160.0))
    found = log_sd_of_truncation(mean=70.0, max_tokens=160.0, truncated_fraction=share)
    assert found == pytest.approx(0.45, abs=0.005)


def test_observed_lengths_are_kept() -> None:
    lengths = observed([30, 10, 20])
    assert stratified(lengths, 3, longest_of_count=3).tolist() == pytest.approx([10.0, 20.0, 29.3], abs=1.0)
    with pytest.raises(ConfigError, match="lengths must hold at least one response"):
        observed([])


def test_acceptance_length_counts_the_bonus_token() -> None:
    assert acceptance_length([]) == 1.0
    assert acceptance_length([0.5, 0.5]) == pytest.approx(1.75)  # 1 + 1/2 + 1/4
    assert conditional_rates([0.8, 0.4]) == (0.8, 0.5)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_rates_by_position_fit_the_papers_lengths_and_a_constant_rate_does_not(workload: str) -> None:
    lengths = paper_lengths(workload)
    profile = fit_profile(lengths)
    assert all(profile.length(k) == pytest.approx(length, abs=0.05) for k, length in lengths.items())
    assert profile.fall > 0
    constant = AcceptanceProfile(level=0.0, fall=0.0).with_length(3, lengths[3])
    assert constant.length(7) > lengths[7] + 0.15


@given(st.integers(1, 12), st.floats(0.0, 1.0), st.floats(-0.2, 0.5))
def test_a_profile_takes_any_length_that_k_allows(k: int, share: float, fall: float) -> None:
    length = 1.0 + share * k
    assert AcceptanceProfile(level=0.0, fall=fall).with_length(k, length).length(k) == pytest.approx(length, abs=1e-6)


def test_an_impossible_acceptance_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"acceptance_length must lie in \[1, k \+ 1 = 4\], got 4.5"):
        AcceptanceProfile(level=0.0, fall=0.0).with_length(3, 4.5)


def test_the_solver_finds_a_line_and_its_covariance() -> None:
    x, y = np.arange(5.0), np.array([1.0, 3.0, 5.0, 7.0, 9.0])
    found = minimise(Problem(residuals=lambda p: p[0] + p[1] * x - y, prior=np.zeros(2), prior_sd=np.array([1e6, 1e6])))
    assert found.converged
    assert found.solution == pytest.approx([1.0, 2.0], abs=1e-6)
    # (X'X)^-1 of a line through x = 0..4: [[0.6, -0.2], [-0.2, 0.1]].
    assert found.covariance == pytest.approx(np.array([[0.6, -0.2], [-0.2, 0.1]]), abs=1e-4)


def test_a_parameter_without_data_stays_at_its_prior() -> None:
    problem = Problem(residuals=lambda p: np.array([p[0] - 3.0]), prior=np.zeros(2), prior_sd=np.array([10.0, 0.5]))
    found = minimise(problem)
    assert found.solution[1] == pytest.approx(0.0, abs=1e-9)
    assert found.covariance[1, 1] == pytest.approx(0.25, rel=1e-6)


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_exposed_generation_is_what_nothing_hides(generation: float, hidden: float) -> None:
    assert exposed_generation_s(generation, hidden) == max(0.0, generation - hidden)


def test_a_lag_of_0_waits_for_the_whole_batch() -> None:
    lengths = LongTailed(median=50.0, log_sd=0.8, max_tokens=300.0)
    found = overlap(TRAINER, lengths=lengths, shape=SHAPE, lag=0, seconds=batch_times_ten)
    synchronous_s = float(batch_times_ten(slowest_engine(lengths, SHAPE)).sum())
    assert found.step.generation_s == synchronous_s
    assert found.step.step_s == pytest.approx(10.0 + synchronous_s)


@given(st.integers(1, 4), st.floats(0.1, 1.5), st.floats(0.0, 500.0))
def test_a_longer_lag_is_never_slower_and_the_longest_response_ends_in_time(
    lag: int, log_sd: float, train_s: float
) -> None:
    lengths: Lengths = LongTailed(median=50.0, log_sd=log_sd, max_tokens=300.0)
    trainer = Step(data_s=0.0, prepare_s=0.0, generation_s=0.0, logprob_s=0.0, train_s=train_s)
    nearer, farther = (
        overlap(trainer, lengths=lengths, shape=SHAPE, lag=each, seconds=batch_times_ten) for each in (lag - 1, lag)
    )
    assert farther.step.step_s <= nearer.step.step_s + 1e-9
    assert farther.step.generation_s == max(0.0, farther.period_s - train_s)
    drained_s = float(batch_times_ten(slowest_engine(lengths, SHAPE)).sum())
    assert farther.latency_bound_s <= farther.period_s + 1e-9 or farther.period_s == drained_s


def test_equal_responses_are_bound_by_latency() -> None:
    # Four an engine, 100 tokens each, lag 1: r = 4 x 2 = 8 running, a token takes 1.8 s, 180 s over two steps.
    lengths = LongTailed(median=100.0, log_sd=0.0, max_tokens=100.0)
    found = overlap(TRAINER, lengths=lengths, shape=SHAPE, lag=1, seconds=batch_times_ten)
    assert found.running == 8.0
    assert found.period_s == pytest.approx(90.0)
    assert found.step.step_s == pytest.approx(90.0)


def test_a_share_of_065_joins_the_papers_projected_pairs() -> None:
    assert amdahl(0.65, 2.72) == pytest.approx(1.70, abs=0.005)
    assert amdahl(0.65, 6.49) == pytest.approx(2.22, abs=0.005)
    step = Step(data_s=0.0, prepare_s=0.0, generation_s=65.0, logprob_s=15.0, train_s=20.0)
    assert step.step_s / step.with_generation(65.0 / 2.72).step_s == pytest.approx(amdahl(0.65, 2.72))
