"""Summaries of timings and rates against values worked by hand."""

import math
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from benchmarks.coverage import METHODS, Noise, coverage
from slipstream.statistics import (
    MIN_STEPS,
    Estimate,
    Spread,
    amdahl,
    difference,
    grouped_ratio,
    moving_average,
    ratio,
    reward_ci95,
    spread,
    wilson_ci95,
)


def test_spread_interpolates_between_order_statistics() -> None:
    # Ranks 0..4: the 10th percentile lies at rank 0.4, the 90th at rank 3.6.
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(median=3.0, p10=1.4, p90=4.6)
    assert spread([2.5]) == Spread(median=2.5, p10=2.5, p90=2.5)


def test_a_moving_average_shrinks_at_the_ends_and_of_even_length_reaches_further_ahead_than_back() -> None:
    assert moving_average([1.0, 2.0, 6.0, 3.0], 3) == [1.5, 3.0, pytest.approx(11 / 3), 4.5]
    assert moving_average([1.0, 2.0, 6.0], 1) == [1.0, 2.0, 6.0]
    assert moving_average([], 3) == []
    assert moving_average([1.0, 2.0, 6.0, 3.0, 8.0], 2) == [1.5, 4.0, 4.5, 5.5, 8.0]
    assert moving_average([1.0, 2.0, 6.0, 3.0, 8.0], 4) == [3.0, 3.0, 4.75, pytest.approx(17 / 3), 5.5]


def test_half_the_time_made_twice_as_fast_makes_the_whole_a_third_faster() -> None:
    # 1 / (0.5 / 2 + 0.5) = 4 / 3
    assert amdahl(0.5, 2.0) == pytest.approx(4 / 3)
    assert amdahl(0.25, 0.5) == pytest.approx(1 / 1.25)  # a part that became slower
    assert (amdahl(0.0, 5.0), amdahl(1.0, 4.0)) == (1.0, 4.0)


def test_paired_and_unpaired_arms_have_the_t_intervals_of_their_logarithms() -> None:
    # Logarithms -0.2 to 0.2 about log 2: variance 0.025, t(4) = 2.7764, wider by 1.05.
    logs = np.array([0.1, -0.2, 0.0, 0.2, -0.1])
    found = ratio((2 * np.exp(logs)).tolist(), [1.0] * 5, paired=True)
    half = 1.05 * 2.776445 * math.sqrt(0.025 / 5)
    assert found.value == pytest.approx(2.0)
    assert found.ci95 == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))
    # Kept are the logarithms 0.1 to 0.8, mean 0.45. Winsorised their squares sum to 0.665; t(7) = 2.364624.
    logs = [0.3, 0.0, 0.8, 0.1, 9.0, 0.5, 0.2, 0.4, 0.7, 0.6]
    found = ratio(np.exp(logs).tolist(), [1.0] * 10, paired=True)
    half = 1.05 * 2.364624 * math.sqrt(0.665 / (8 * 7))
    assert found.value == pytest.approx(math.exp(0.45))
    assert found.ci95 == pytest.approx((math.exp(0.45 - half), math.exp(0.45 + half)))
    # Squared errors 0.025 / 5 and 0.1 / 5, both with 4 degrees of freedom: 0.025^2 / ((0.005^2 + 0.02^2) / 4) = 5.882.
    base, cand = np.exp([-0.2, -0.1, 0.0, 0.1, 0.2]), np.exp([-0.4, 0.2, 0.0, -0.2, 0.4])
    found = ratio((3 * base).tolist(), cand.tolist(), paired=False)
    half = 1.05 * special.stdtrit(0.025**2 / ((0.005**2 + 0.02**2) / 4), 0.975) * math.sqrt(0.025)
    assert found.value == pytest.approx(3.0)
    assert found.ci95 == pytest.approx((3 * math.exp(-half), 3 * math.exp(half)))


def test_what_paired_steps_have_in_common_cancels() -> None:
    times = [1.0, 5.0, 2.0, 9.0, 3.0]
    paired = ratio([2 * t for t in times], times, paired=True)
    assert (paired.value, *(paired.ci95 or ())) == pytest.approx((2.0, 2.0, 2.0))
    apart = ratio([2 * t for t in times], times, paired=False).ci95
    assert apart is not None and apart[0] < 1.0 and apart[1] > 4.0


@pytest.mark.parametrize("paired", [True, False])
def test_there_is_no_interval_below_five_steps(paired: bool) -> None:
    times = [3.0, 2.0, 4.0, 5.0, 6.0]
    assert MIN_STEPS == 5
    assert ratio(times, times[::-1], paired=paired).ci95 is not None
    for num in (1, 2, 3, 4):
        found = ratio([3.0] * num, [2.0] * num, paired=paired)
        assert (found.value, found.ci95) == (pytest.approx(1.5), None)


def test_steps_of_no_time_have_a_ratio_without_an_interval() -> None:
    assert ratio([0.0, 3.0, 3.0, 3.0, 6.0], [1.0, 2.0, 2.0, 2.0, 3.0], paired=True) == Estimate(value=1.5, ci95=None)
    assert ratio([0.0] * 5, [1.0] * 5, paired=False) == Estimate(value=0.0, ci95=None)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        *(
            (partial(each, []), "values must hold at least one observation, got none")
            for each in (spread, wilson_ci95, grouped_ratio)
        ),
        (partial(difference, [], []), "values must hold at least one observation, got none"),
        (partial(ratio, [], [1.0], paired=False), "values must hold at least one observation, got none"),
        (partial(ratio, [1.0], [], paired=False), "values must hold at least one observation, got none"),
        (partial(ratio, [1.0], [0.0], paired=False), "candidate must be > 0 in every step, got 0.0"),
        (partial(ratio, [1.0, -1.0], [1.0, 1.0], paired=True), "baseline must be >= 0 in every step, got -1.0"),
        (partial(ratio, [1.0, 2.0], [1.0], paired=True), "paired arms must have equally many steps, got 2 and 1"),
        (partial(difference, [1.0], [1.0, 2.0]), "paired arms must have equally many steps, got 1 and 2"),
        (partial(wilson_ci95, [0.5, 1.5]), "rates must lie in [0, 1], got 0.5 to 1.5"),
        (partial(wilson_ci95, [-0.5, 0.5]), "rates must lie in [0, 1], got -0.5 to 0.5"),
    ],
)
def test_what_no_figure_can_be_had_of_is_refused(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ask()


@given(
    st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(0.1, 100.0)), min_size=5, max_size=12),
    st.floats(0.1, 10.0),
    st.booleans(),
)
def test_a_ratio_scales_and_turns_over(pairs: list[tuple[float, float]], factor: float, paired: bool) -> None:
    base, cand = [first for first, _ in pairs], [second for _, second in pairs]
    plain = _three(ratio(base, cand, paired=paired))
    assert plain[1] <= plain[0] <= plain[2]
    assert _three(ratio([factor * t for t in base], cand, paired=paired)) == pytest.approx(factor * plain)
    assert _three(ratio(base[::-1], cand[::-1], paired=paired)) == pytest.approx(plain)
    assert _three(ratio(cand, base, paired=paired)) == pytest.approx(1 / plain[[0, 2, 1]])


@pytest.mark.parametrize("num_steps", [5, 8, 24])
def test_the_interval_holds_the_true_ratio_about_95_times_in_100(num_steps: int) -> None:
    """Steps with drift, neighbours that correlate by 0.05 and some that something else slowed down."""
    correlated = {"own_correlation": 0.05, "drift_correlation": 0.7}
    noise = Noise(own_sd=0.1, drift_sd=0.2, work_sd=0.3, slow_rate=0.02, slow_size=0.5, **correlated)
    assert 0.935 <= coverage(METHODS["trimmed t, as reported"], noise, num_steps, num_runs=1500).held <= 0.975


def test_groups_have_the_t_interval_of_their_logarithms_and_one_keeps_its_own() -> None:
    # Logarithms of 1 and 4 about log 2: standard error log 2, t(1) = 12.706.
    groups = [Estimate(value=1.0, ci95=(0.9, 1.1)), Estimate(value=4.0, ci95=(3.9, 4.1))]
    found = grouped_ratio(groups)
    assert found.value == pytest.approx(2.0)
    assert found.ci95 == pytest.approx((2 * 2**-12.7062047, 2 * 2**12.7062047))
    one, none = Estimate(value=1.5, ci95=(1.2, 1.9)), Estimate(value=6.0, ci95=None)
    assert grouped_ratio([one]) == one
    assert (grouped_ratio([one, none]).value, grouped_ratio([one, none]).ci95) == (pytest.approx(3.0), None)
    assert grouped_ratio([none, Estimate(value=0.0, ci95=None)]) == Estimate(value=0.0, ci95=None)


def test_a_difference_is_the_mean_over_pairs_with_its_t_interval_but_of_few_or_equal_ones() -> None:
    # Differences 1 to 5: mean 3, variance 2.5, t(4) = 2.7764.
    half = 2.776445 * math.sqrt(2.5 / 5)
    found = difference([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 6.0, 8.0, 10.0])
    assert found.value == pytest.approx(3.0)
    assert found.ci95 == pytest.approx((3 - half, 3 + half))
    assert difference([1.0] * 4, [2.0, 4.0, 2.0, 4.0]) == Estimate(value=2.0, ci95=None)
    assert difference([0.0] * 30, [0.0] * 30) == Estimate(value=0.0, ci95=None)
    assert difference([0.3, 0.2, 0.1, 0.7, 0.6], [0.4, 0.3, 0.2, 0.8, 0.7]).ci95 is None  # alike but for rounding


def test_solved_problems_have_wilsons_interval_by_the_samples_that_their_spread_is_worth() -> None:
    # t(29) = 2.04523: 0 of 30 reaches up to t^2 / (30 + t^2).
    high = 2.045230**2 / (30 + 2.045230**2)
    assert wilson_ci95([0.0] * 30) == pytest.approx((0.0, high))
    assert wilson_ci95([1.0] * 30) == pytest.approx((1 - high, 1.0))
    assert wilson_ci95([0.0])[1] > 0.99
    # 15 of 30: variance of the mean 0.25 / 29, so 29 independent samples; centre 1/2, half t / (2 sqrt(29 + t^2)).
    half = 2.045230 / (2 * math.sqrt(29 + 2.045230**2))
    assert wilson_ci95([0.0, 1.0] * 15) == pytest.approx((0.5 - half, 0.5 + half))
    # Rates 0.4 and 0.6: variance of the mean 0.01 / 29, so 725 samples. With four that are solved at all it is 30.
    half = 2.045230 / (2 * math.sqrt(725 + 2.045230**2))
    assert wilson_ci95([0.4, 0.6] * 15) == pytest.approx((0.5 - half, 0.5 + half))
    rare = [0.01] * 4 + [0.0] * 26
    high = wilson_ci95(rare)[1]
    assert high > 0.1
    assert wilson_ci95([0.01] * 5 + [0.0] * 25)[1] < high / 5


def test_rewards_of_prompts_have_an_interval_also_where_all_are_0() -> None:
    assert reward_ci95([0.0] * 30) == wilson_ci95([0.0] * 30)  # (0, t^2 / (30 + t^2)) with t(29) = 2.04523
    assert reward_ci95([0.0]) is None  # one prompt shows no spread
    # Rewards -1 and 2 of five prompts each: mean 0.5, standard error sqrt(22.5 / 9 / 10), t(9) = 2.262157.
    half = 2.262157 * 0.25**0.5
    assert reward_ci95([-1.0, 2.0] * 5) == pytest.approx((0.5 - half, 0.5 + half))
    assert reward_ci95([2.0] * 9) is None


def _three(estimate: Estimate) -> np.ndarray:
    assert estimate.ci95 is not None
    return np.array([estimate.value, *estimate.ci95])
