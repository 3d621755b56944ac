"""Summaries of timings against values worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.statistics import (
    Estimate,
    Spread,
    amdahl,
    bootstrap_difference,
    bootstrap_grouped_ratio,
    bootstrap_ratio,
    moving_average,
    spread,
)


def test_spread_interpolates_between_order_statistics() -> None:
    # Ranks 0..4: the 10th percentile lies at rank 0.4, the 90th at rank 3.6.
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(median=3.0, p10=1.4, p90=4.6)


def test_spread_of_one_value_is_that_value() -> None:
    assert spread([2.5]) == Spread(median=2.5, p10=2.5, p90=2.5)


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one observation"):
        spread([])


def test_ratio_is_of_medians_not_of_means() -> None:
    # Medians 4 and 2; the means, 34 and 2, would give 17.
    assert bootstrap_ratio([1.0, 4.0, 97.0], [2.0, 2.0, 2.0], paired=False).value == 2.0
    assert bootstrap_ratio([1.0, 4.0, 97.0], [2.0, 2.0, 2.0], paired=False, statistic=np.mean).value == 17.0


def test_paired_interval_of_proportional_arms_has_no_width() -> None:
    times = [1.0, 5.0, 2.0, 9.0, 3.0]
    assert bootstrap_ratio([2 * t for t in times], times, paired=True) == Estimate(value=2.0, ci95=(2.0, 2.0))


def test_unpaired_interval_of_the_same_arms_is_wide() -> None:
    times = [1.0, 5.0, 2.0, 9.0, 3.0]
    interval = bootstrap_ratio([2 * t for t in times], times, paired=False).ci95
    assert interval is not None
    assert interval[0] < 1.0 and interval[1] > 4.0


def test_interval_of_two_steps_is_their_extremes() -> None:
    # The four equally likely resamples of (1, 3) have means 1, 2, 2, 3: each extreme holds 25 % of the mass.
    assert bootstrap_ratio([1.0, 3.0], [1.0, 1.0], paired=True, statistic=np.mean) == Estimate(value=2.0, ci95=(1, 3))


def test_one_step_an_arm_gives_no_interval() -> None:
    assert bootstrap_ratio([3.0], [2.0, 2.0], paired=False) == Estimate(value=1.5, ci95=None)


def test_equal_seeds_give_equal_intervals_and_others_differ() -> None:
    base, cand = [1.0, 2.5, 4.0, 3.0, 2.2], [0.7, 1.9, 1.1, 1.3]
    first = bootstrap_ratio(base, cand, paired=False, statistic=np.mean, num_resamples=500, seed=1)
    assert first == bootstrap_ratio(base, cand, paired=False, statistic=np.mean, num_resamples=500, seed=1)
    assert first != bootstrap_ratio(base, cand, paired=False, statistic=np.mean, num_resamples=500, seed=2)


def test_interval_covers_the_true_ratio_about_95_times_in_100() -> None:
    random = np.random.default_rng(7)
    hits = 0
    for trial in range(200):
        base = random.normal(4.0, 0.5, 40).tolist()
        cand = random.normal(2.0, 0.3, 40).tolist()
        low, high = bootstrap_ratio(base, cand, paired=False, num_resamples=400, seed=trial).ci95 or (0.0, 0.0)
        hits += low <= 2.0 <= high
    assert 180 <= hits <= 199


def test_a_time_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"candidate must be > 0 in every step, got 0\.0"):
        bootstrap_ratio([1.0], [0.0], paired=False)


def test_paired_arms_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many steps, got 2 and 1"):
        bootstrap_ratio([1.0, 2.0], [1.0], paired=True)


@given(st.lists(st.floats(0.1, 100.0), min_size=2, max_size=12), st.floats(0.1, 10.0))
def test_interval_scales_with_the_baseline(times: list[float], factor: float) -> None:
    candidate = [1.0] * len(times)
    plain = bootstrap_ratio(times, candidate, paired=True, num_resamples=200)
    scaled = bootstrap_ratio([factor * t for t in times], candidate, paired=True, num_resamples=200)
    assert plain.ci95 is not None and scaled.ci95 is not None
    assert scaled.value == pytest.approx(factor * plain.value)
    assert scaled.ci95 == pytest.approx([factor * bound for bound in plain.ci95])


def test_moving_average_shrinks_at_the_ends() -> None:
    assert moving_average([1.0, 2.0, 6.0, 3.0], 3) == [1.5, 3.0, pytest.approx(11 / 3), 4.5]
    assert moving_average([1.0, 2.0, 6.0], 1) == [1.0, 2.0, 6.0]
    assert moving_average([], 3) == []


def test_a_share_of_065_joins_the_papers_projected_pairs() -> None:
    assert amdahl(0.65, 2.72) == pytest.approx(1.70, abs=0.005)
    assert amdahl(0.65, 6.49) == pytest.approx(2.22, abs=0.005)


def test_a_share_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"share must lie in \[0, 1\], got 1.5"):
        amdahl(1.5, 2.0)
    with pytest.raises(ValueError, match="speedup must be > 0, got 0"):
        amdahl(0.5, 0.0)


def test_a_window_of_even_length_reaches_further_ahead_than_back() -> None:
    assert moving_average([1.0, 2.0, 6.0, 3.0, 8.0], 2) == [1.5, 4.0, 4.5, 5.5, 8.0]
    assert moving_average([1.0, 2.0, 6.0, 3.0, 8.0], 4) == [3.0, 3.0, 4.75, pytest.approx(17 / 3), 5.5]


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^window must be >= 1, got 0$"):
        moving_average([1.0], 0)


def test_half_the_time_made_twice_as_fast_makes_the_whole_a_third_faster() -> None:
    # 1 / (0.5 / 2 + 0.5) = 4 / 3
    assert amdahl(0.5, 2.0) == pytest.approx(4 / 3)
    assert amdahl(0.25, 0.5) == pytest.approx(1 / 1.25)  # a part that became slower
    assert (amdahl(0.0, 5.0), amdahl(1.0, 4.0)) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("share", "speedup", "message"),
    [
        (-0.1, 2.0, "share must lie in [0, 1], got -0.1"),
        (1.1, 2.0, "share must lie in [0, 1], got 1.1"),
        (0.5, 0.0, "speedup must be > 0, got 0.0"),
    ],
)
def test_what_amdahl_cannot_answer_is_refused(share: float, speedup: float, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        amdahl(share, speedup)
    assert str(caught.value) == message


def test_the_bootstrap_is_the_one_of_its_seed() -> None:
    """Drawn here with the same generator: 10,000 resamples of seed 0 unless told, by step where the arms are paired."""
    base, cand = np.sqrt([2.0, 3.0, 5.0, 7.0]), np.sqrt([1.3, 1.9, 1.1, 1.7])
    random = np.random.default_rng(0)
    rows = random.integers(4, size=(10_000, 4))
    paired = base[rows].mean(axis=1) / cand[rows].mean(axis=1)
    apart = base[rows].mean(axis=1) / cand[random.integers(4, size=(10_000, 4))].mean(axis=1)
    for flag, ratios in ((True, paired), (False, apart)):
        interval = bootstrap_ratio(base.tolist(), cand.tolist(), paired=flag, statistic=np.mean).ci95
        assert interval == pytest.approx(tuple(np.percentile(ratios, [2.5, 97.5])))


def test_an_arm_without_steps_is_refused() -> None:
    for base, cand in (([], [1.0]), ([1.0], [])):
        with pytest.raises(ValueError, match=r"^values must hold at least one observation, got none$"):
            bootstrap_ratio(base, cand, paired=False)


def test_a_grouped_ratio_is_the_geometric_mean_of_the_groups() -> None:
    # Ratios of medians 4 and 1: their geometric mean is 2; the pooled medians would give 20 / 5.5.
    pairs = [([8.0, 8.0, 8.0], [2.0, 2.0, 2.0]), ([20.0, 20.0], [20.0, 20.0])]
    found = bootstrap_grouped_ratio(pairs)
    assert found.value == pytest.approx(2.0)
    assert found.ci95 == pytest.approx((1.0, 4.0))  # a quarter of the draws holds the same group twice


def test_one_group_is_a_ratio_paired_by_step() -> None:
    base, cand = [1.0, 2.5, 4.0, 3.0, 2.2], [0.7, 1.9, 1.1, 1.3, 0.9]
    assert bootstrap_grouped_ratio([(base, cand)], seed=3) == bootstrap_ratio(base, cand, paired=True, seed=3)


def test_steps_are_resampled_within_each_group() -> None:
    # One ratio in both groups, steps of 1 or 4 s that pair: no width. Shuffled, they do not: some.
    times = [1.0, 4.0, 1.0, 4.0, 4.0]
    same = bootstrap_grouped_ratio([([2 * t for t in times], times)] * 2).ci95
    other = bootstrap_grouped_ratio([([2 * t for t in times], times[::-1])] * 2).ci95
    assert same == pytest.approx((2.0, 2.0))
    assert other is not None and other[0] < 1.5 < 2.5 < other[1]


def test_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one observation"):
        bootstrap_grouped_ratio([])


def test_a_difference_is_the_mean_over_pairs_with_the_interval_of_its_seed() -> None:
    """10,000 resamples of whole pairs with seed 0 unless told."""
    base, cand = np.sqrt(np.arange(2.0, 14.0)), np.sqrt(np.arange(29.0, 5.0, -2.0))
    rows = np.random.default_rng(0).integers(12, size=(10_000, 12))
    expected = np.percentile((cand - base)[rows].mean(axis=1), [2.5, 97.5])
    found = bootstrap_difference(base.tolist(), cand.tolist())
    assert found.value == pytest.approx((cand - base).mean())
    assert found.ci95 == pytest.approx(tuple(expected), rel=1e-12)
    assert bootstrap_difference(base.tolist(), cand.tolist(), seed=1).ci95 != found.ci95


def test_a_difference_of_two_pairs_has_their_extremes_and_of_one_pair_no_interval() -> None:
    assert bootstrap_difference([1.0, 1.0], [2.0, 4.0]).ci95 == (1.0, 3.0)
    assert bootstrap_difference([1.0], [3.0]) == Estimate(value=2.0, ci95=None)


def test_a_difference_of_arms_that_are_no_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^paired arms must have equally many steps, got 1 and 2$"):
        bootstrap_difference([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"^values must hold at least one observation, got none$"):
        bootstrap_difference([], [])


@pytest.mark.parametrize("length", [6, 5])
def test_the_grouped_bootstrap_is_the_one_of_its_seed(length: int) -> None:
    """Drawn here with the same generator: three times one of three groups, and steps anew in it, paired or not."""
    base = np.sqrt(np.arange(2.0, 8.0))
    groups = [(base * scale, np.sqrt(np.arange(scale, scale + length))) for scale in (1.0, 2.0, 5.0)]
    random = np.random.default_rng(0)
    logs = np.zeros(10_000)
    for _ in groups:
        drawn = random.integers(3, size=10_000)
        for group, (slow, fast) in enumerate(groups):
            num = int((drawn == group).sum())
            slow_rows = random.integers(6, size=(num, 6))
            fast_rows = slow_rows if length == 6 else random.integers(5, size=(num, 5))
            ratios = np.median(slow[slow_rows], axis=1) / np.median(fast[fast_rows], axis=1)
            logs[drawn == group] += np.log(ratios)
    found = bootstrap_grouped_ratio([(slow.tolist(), fast.tolist()) for slow, fast in groups])
    assert found.ci95 == pytest.approx(tuple(np.percentile(np.exp(logs / 3), [2.5, 97.5])), rel=1e-12)


def test_one_group_has_the_interval_of_its_seed_paired_or_not() -> None:
    base, cand = np.sqrt(np.arange(2.0, 9.0)).tolist(), np.sqrt(np.arange(1.0, 7.0)).tolist()
    apart = bootstrap_ratio(base, cand, paired=False, num_resamples=3, seed=4)
    assert bootstrap_grouped_ratio([(base, cand)], num_resamples=3, seed=4) == apart
    together = bootstrap_ratio(base[:6], cand, paired=True, num_resamples=3, seed=4)
    assert bootstrap_grouped_ratio([(base[:6], cand)], num_resamples=3, seed=4) == together
