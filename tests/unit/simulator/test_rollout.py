"""Lengths of responses and continuous batching over them, worked by hand."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.simulator.rollout import (
    Lengths,
    RolloutShape,
    batch_in_slots,
    cached_sequences,
    lengths_with_mean,
    level_of_longest,
    log_sd_reaching,
    longest_of,
    mean_context,
    mean_longest_of,
    slowest_engine,
    stratified,
)


def test_the_longest_of_one_is_the_median_and_of_more_is_longer_on_average() -> None:
    lengths = Lengths(median=100.0, log_sd=0.5, max_tokens=1e6)
    assert longest_of(lengths, 1) == pytest.approx(100.0, rel=1e-3)
    # Half of all pairs lie below level sqrt(1/2) = 0.7071, where the normal quantile is 0.5450.
    assert longest_of(lengths, 2) == pytest.approx(100.0 * np.exp(0.5 * 0.5450), rel=1e-3)
    assert mean_longest_of(lengths, 1) == pytest.approx(lengths.mean_tokens)
    assert lengths.mean_tokens < mean_longest_of(lengths, 8) < mean_longest_of(lengths, 32)
    assert mean_longest_of(Lengths(median=100.0, log_sd=0.0, max_tokens=100.0), 8) == 100.0


def test_the_mean_the_truncated_share_and_the_longest_response_give_the_lengths_back() -> None:
    lengths = lengths_with_mean(mean=600.0, log_sd=1.0, max_tokens=1000.0)
    assert lengths.mean_tokens == pytest.approx(600.0, rel=1e-4)
    assert longest_of(lengths, 10_000) == 1000.0
    lengths = lengths_with_mean(mean=70.0, log_sd=0.45, max_tokens=160.0)
    share = float(np.mean(stratified(lengths, 100_000, longest_of_count=100_000) >= 160.0))
    assert log_sd_reaching(160.0, level=1.0 - share, mean=70.0, max_tokens=160.0) == pytest.approx(0.45, abs=0.005)
    of_48 = partial(log_sd_reaching, level=level_of_longest(48), mean=40.0, max_tokens=160.0)
    longest = longest_of(lengths_with_mean(mean=40.0, log_sd=0.2, max_tokens=160.0), 48)
    assert of_48(longest) == pytest.approx(0.2, abs=0.001)
    assert of_48(40.0) == pytest.approx(0.01, abs=0.001)
    assert of_48(39.0) == pytest.approx(0.01, abs=0.001)  # the median of few rounds lies below the mean of all
    # The longer of two lies at most exp(0.545^2 / 2) = 1.16 times above the mean, where log_sd is the quantile 0.545.
    of_2 = partial(log_sd_reaching, level=level_of_longest(2), mean=40.0, max_tokens=1000.0)
    assert [of_2(each) for each in (44.0, 46.4, 200.0)] == pytest.approx([0.22, 0.51, 0.55], abs=0.03)


def test_the_running_batch_shrinks_to_the_longest_and_a_sequence_starts_where_another_has_ended() -> None:
    trace = batch_in_slots(np.array([2.0, 5.0, 5.0]), prompt_tokens=10.0, num_slots=3)
    assert trace.tokens_S.tolist() == [2.0, 3.0]
    assert trace.batch_S.tolist() == [3.0, 2.0]
    # Three sequences half-way to token 2, then two half-way from 2 to 5.
    assert trace.context_S.tolist() == [3 * 11.0, 2 * 13.5]
    # Two slots: 4 and 2 start, 3 follows the 2 and ends at 5.
    trace = batch_in_slots(np.array([4.0, 2.0, 3.0]), prompt_tokens=10.0, num_slots=2)
    assert trace.tokens_S.tolist() == [2.0, 2.0, 1.0]
    assert trace.batch_S.tolist() == [2.0, 2.0, 1.0]
    # Half-way through each span: 1 + 1, then 3 + 1, then 2.5 tokens beside the prompts.
    assert trace.context_S.tolist() == [22.0, 24.0, 12.5]


def test_more_engines_share_the_work_but_not_the_tail_and_memory_that_does_not_bind_changes_nothing() -> None:
    lengths = Lengths(median=100.0, log_sd=1.0, max_tokens=5000.0)
    few, many = (
        slowest_engine(lengths, RolloutShape(num_rollouts=256, num_engines=engines, prompt_tokens=0.0))
        for engines in (2, 32)
    )
    assert many.batch_S.max() == 8
    assert few.batch_S.max() == 128
    assert many.tokens_S.sum() == pytest.approx(few.tokens_S.sum())  # both wait for the longest of all 256
    lengths = Lengths(median=100.0, log_sd=0.0, max_tokens=100.0)
    shape = RolloutShape(num_rollouts=8, num_engines=2, prompt_tokens=10.0, cache_tokens=4 * 60.0)
    assert cached_sequences(lengths, shape) == pytest.approx(4.0)
    assert slowest_engine(lengths, shape).batch_S.max() == 4
    tight = RolloutShape(num_rollouts=8, num_engines=2, prompt_tokens=10.0, cache_tokens=2 * 60.0)
    assert slowest_engine(lengths, tight).batch_S.max() == 2
    assert slowest_engine(lengths, tight).tokens_S.sum() == pytest.approx(200.0)


def test_an_engine_that_is_never_drained_meets_long_responses_more_often() -> None:
    # Equal responses of 100 tokens are half-way through on average: 50 of them and 10 of the prompt are cached.
    alike, wide = (Lengths(median=100.0, log_sd=sd, max_tokens=limit) for sd, limit in ((0.0, 100.0), (0.5, 1e6)))
    assert mean_context(alike, prompt_tokens=10.0) == pytest.approx(60.0)
    assert mean_context(wide, prompt_tokens=0.0) > 0.55 * wide.mean_tokens


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 60))
def test_slots_lose_no_token_and_fewer_never_end_sooner(lengths: list[int], num_slots: int) -> None:
    few, more = (
        batch_in_slots(np.array(lengths, dtype=float), prompt_tokens=5.0, num_slots=number)
        for number in (num_slots, num_slots + 1)
    )
    assert few.tokens_S @ few.batch_S == pytest.approx(sum(lengths))
    assert few.batch_S.max() == min(num_slots, len(lengths))
    assert few.batch_S.min() >= 1
    # Each running sequence has at least its prompt and at most its whole response in the cache.
    assert np.all(few.context_S >= 5.0 * few.batch_S)
    assert np.all(few.context_S <= (5.0 + max(lengths)) * few.batch_S)
    assert few.tokens_S.sum() >= more.tokens_S.sum() - 1e-9
