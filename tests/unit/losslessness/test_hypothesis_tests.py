"""The certificate's statistics: by hand, and on draws from known conditionals."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import special, stats

from slipstream.learner.logprobs import conditionals
from slipstream.losslessness import hypothesis_tests
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.hypothesis_tests import Bias, Draws
from slipstream.records.stages import Power

VOCABULARY = 12


@pytest.mark.slow  # hundreds of certificates
def test_an_exact_engine_fails_about_as_often_as_the_family_level_says() -> None:
    """400 families at a level of 10 %: 40 expected at most, and a broken test fails nearly all."""
    random = np.random.default_rng(0)
    rejected = 0
    for _ in range(400):
        draws = exact_draws(600, random)
        found = hypothesis_tests.conditional_tests(draws, seed=int(random.integers(2**31)))
        rejected += any(finding.reject for finding in hypothesis_tests.family(found, level=0.1))

    assert rejected <= 60


def exact_draws(num: int, random: np.random.Generator) -> Draws:
    """Draws from their own conditionals, at four positions."""
    logits_NV = torch.tensor(random.normal(size=(num, VOCABULARY)) * 1.5)
    labels = torch.tensor([random.choice(VOCABULARY, p=p) for p in logits_NV.softmax(-1).numpy()])
    generator = torch.Generator().manual_seed(int(random.integers(2**31)))
    c = conditionals(logits_NV, labels, temperature=1.0, top_p=1.0, top_k=0, generator=generator).numpy().T
    position = random.integers(0, 4, size=num)
    return Draws(*c[:5], position=position, sharper=Bias(*c[5:8]), flatter=Bias(*c[8:]))


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.02, 0.04 times 3, 2, 1 are 0.03, 0.04, 0.04."""
    assert hypothesis_tests.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert hypothesis_tests.holm([0.9, 0.8]) == [1.0, 1.0]  # never beyond 1


@pytest.mark.parametrize(
    ("counts", "shares", "statistic", "dof"),
    [
        ([60, 40], [0.5, 0.5], 4.0, 1),  # (60 - 50)^2 / 50 + (40 - 50)^2 / 50
        ([94, 6, 0], [0.94, 0.03, 0.03], 0.0, 1),  # expected 94, 3, 3: the rare ones make one cell of 6
        ([6, 4], [0.5, 0.5], 0.4, 1),  # a cell that expects exactly five stands alone
        ([6, 6, 6, 2], [0.3, 0.3, 0.3, 0.1], 0.0, 2),  # pooled smallest first: 2 + 6, then 6, then 6
        # Expected 4, 4, 4: 8 make a cell, the third joins it, and one cell has nothing to differ from.
        ([0, 0, 12], [1 / 3, 1 / 3, 1 / 3], 0.0, 0),
        ([2, 1], [0.5, 0.5], 0.0, 0),  # too few for one cell
    ],
)
def test_chi_square_of_counts_by_hand(counts: list[int], shares: list[float], statistic: float, dof: int) -> None:
    assert hypothesis_tests.count_test(np.array(counts), np.array(shares)) == (pytest.approx(statistic), dof)


@pytest.mark.parametrize(
    ("first", "second", "statistic"),
    [
        ([30, 70], [30, 70], 0.0),
        ([60, 40], [40, 60], 8.0),
        # Shares 120 / 180 = 2/3 of cells of 100 and 80: expected 66.67 and 53.33, variances 22.22 and 17.78.
        ([80, 40], [20, 40], (80 - 200 / 3) ** 2 / (200 / 9) + (40 - 160 / 3) ** 2 / (160 / 9)),
        # The second sample is a tenth: it expects 10, 4 and 6, so the last two are one cell of 100, as is the first.
        ([95, 35, 50], [5, 5, 10], 2 * (95 - 90) ** 2 / 9),
    ],
)
def test_two_samples_differ_in_what_their_cells_hold(first: list[int], second: list[int], statistic: float) -> None:
    assert hypothesis_tests.homogeneity_test(np.array(first), np.array(second)) == (pytest.approx(statistic), 1)


def test_independent_statistics_add_up() -> None:
    statistic, p_value = hypothesis_tests.summed_chi_square([(1.0, 1), (3.0, 2)])
    assert (statistic, p_value) == (4.0, pytest.approx(stats.chi2.sf(4.0, 3)))
    assert hypothesis_tests.summed_chi_square([(3.0, 0)]) == (3.0, 1.0)  # nothing was tested
    # One degree of freedom: 4 is the square of a normal deviate of 2.
    assert hypothesis_tests.summed_chi_square([(4.0, 1)]) == (4.0, pytest.approx(0.0455, abs=1e-4))


def test_the_transform_puts_a_token_inside_its_share_of_the_mass() -> None:
    v = np.random.default_rng(7).random(3)
    u = hypothesis_tests.uniforms(np.array([0.2, np.nan, 0.9]), np.array([0.3, 0.5, 10.0]), seed=7)
    assert u.tolist() == [0.2 + v[0] * 0.3, 1.0, 1.0]  # NaN: a token that the policy cannot draw


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        # positions 0 to 3, each reached so often
        ((100, 150, 120, 100), {"no draft": 100, "draft position 1": 150, "draft position 2": 120, "bonus token": 100}),
        ((100, 150, 120, 99), {"no draft": 100, "draft position 1": 150, "draft position 2": 219}),
        ((5, 150, 0, 100), {"no draft": 5, "draft position 1": 150, "bonus token": 100}),
        ((0, 0, 0, 0), {}),
    ],
)
def test_rare_positions_join_the_one_before(counts: tuple[int, ...], expected: dict[str, int]) -> None:
    masks = hypothesis_tests.window_positions(np.repeat(np.arange(4), counts))
    assert {name: int(mask.sum()) for name, mask in masks.items()} == expected


def placed(mass_before: np.ndarray, *, z: float = 0.0, mean: float = -40.0) -> Draws:
    """Draws whose transform is `mass_before` and whose log-probability lies `z` standard errors above its mean."""
    num = len(mass_before)
    unlikely = np.full(num, np.exp(mean))
    bias = Bias(mass_before=mass_before.copy(), probability=unlikely, total_variation=np.linspace(0.2, 0.6, num))
    return Draws(
        mass_before=mass_before,
        probability=unlikely * np.exp(z / np.sqrt(num)),
        logprob_mean=np.full(num, mean),
        logprob_variance=np.ones(num),
        largest_probability=np.linspace(0.7, 0.9, num),
        position=np.zeros(num, dtype=np.int64),
        sharper=bias,
        flatter=bias,
    )


EVEN = (np.arange(320) + 0.5) / 320  # ten in each of the 32 bins


def test_draws_are_tested_by_bins_by_position_and_by_their_log_probability() -> None:
    found = hypothesis_tests.conditional_tests(placed(EVEN, z=2.0), seed=0)
    assert list(found) == ["pit, all tokens", "pit, no draft", "log-probability, z"]
    assert found["pit, all tokens"] == (320, pytest.approx(0.0), pytest.approx(1.0))
    assert found["pit, no draft"] == (320, pytest.approx(0.5 / 320), pytest.approx(1.0))
    # A normal deviate of 2 has the two-sided p-value erfc(2 / sqrt(2)) = 0.0455.
    assert found["log-probability, z"] == (320, pytest.approx(2.0), pytest.approx(0.0455, abs=1e-4))
    below = hypothesis_tests.conditional_tests(placed(EVEN, z=-2.0), seed=0)["log-probability, z"]
    assert below == (320, pytest.approx(-2.0), pytest.approx(0.0455, abs=1e-4))
    # Ten draws move from the second bin into the first: 10^2 / 10 for each of the two.
    moved = placed(np.where((EVEN > 1 / 32) & (EVEN < 2 / 32), 0.01, EVEN))
    found = hypothesis_tests.conditional_tests(moved, seed=0)["pit, all tokens"]
    assert found == (320, pytest.approx(20.0), pytest.approx(stats.chi2.sf(20.0, 31)))


@pytest.mark.parametrize(
    ("u", "distance"),
    [
        ((0.1, 0.4, 0.5), 0.5),  # 3/3 - 0.5: too much below
        ((0.9, 0.6, 0.8), 0.6),  # 0.6 - 0/3: too much above
    ],
)
def test_the_largest_distance_from_uniform_by_hand(u: tuple[float, ...], distance: float) -> None:
    found = hypothesis_tests.conditional_tests(placed(np.array(u)), seed=0)["pit, no draft"]
    root = np.sqrt(3)
    p_value = special.kolmogorov((root + 0.12 + 0.11 / root) * distance)
    assert found == (3, pytest.approx(distance), pytest.approx(p_value))


def test_an_impossible_token_is_infinitely_unlikely_and_a_certain_one_says_nothing() -> None:
    impossible, sure = placed(EVEN), certain()
    impossible.probability[0] = sure.logprob_variance[:] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for draws, expected in ((impossible, (320, -np.inf, 0.0)), (sure, (64, 0.0, 1.0))):
            assert hypothesis_tests.conditional_tests(draws, seed=0)["log-probability, z"] == expected


def test_two_engines_are_held_against_each_other_by_bins_and_log_probability() -> None:
    """All of the second's draws lie in the upper half; its log-probabilities lie 2 standard errors lower."""
    first, second = placed(EVEN, z=2.0), placed(0.5 + EVEN / 2, z=-2.0, mean=-50.0)
    first.probability[0] = 0.0  # impossible: left to the test against the policy
    found = hypothesis_tests.two_sample_tests(first, second, seed=0)
    # Lower bins hold 10 and 0 where 5 and 5 are expected, upper ones 10 and 20 where 15 are.
    statistic = 16 * 5**2 / (10 / 4) + 16 * 5**2 / (30 / 4)
    z = (4 / np.sqrt(320)) / np.sqrt(1 / 319 + 1 / 320)
    for name, value, p_value in (
        ("pit", statistic, stats.chi2.sf(statistic, 31)),
        ("log-probability", z, special.erfc(z / np.sqrt(2))),
    ):
        expected = (640, pytest.approx(value), pytest.approx(p_value))
        assert found[f"autoregressive beside speculative, {name}"] == expected


def certain() -> Draws:
    """64 draws of the one token that the policy allows: their transform is the random part alone."""
    even, zeros = placed(EVEN), np.zeros(64)
    biases = {"sharper": even.sharper, "flatter": even.flatter}
    return replace(placed(zeros), probability=np.ones(64), logprob_mean=zeros, **biases)


def test_the_random_part_of_the_transform_is_the_seeds_and_each_of_two_engines_has_its_own() -> None:
    counts = [np.histogram(np.random.default_rng(seed).random(64), np.linspace(0, 1, 33))[0] for seed in (3, 4)]
    found = hypothesis_tests.conditional_tests(certain(), seed=3)["pit, all tokens"]
    # Two draws a bin are expected, so three bins make a cell of six; that is left to `count_test`, tested above.
    expected, dof = hypothesis_tests.count_test(counts[0], np.full(32, 1 / 32))
    assert found == (64, pytest.approx(expected), pytest.approx(stats.chi2.sf(expected, dof)))
    both = hypothesis_tests.two_sample_tests(certain(), certain(), seed=3)["autoregressive beside speculative, pit"]
    assert both[1] == pytest.approx(hypothesis_tests.homogeneity_test(*counts)[0])


def test_a_family_rejects_below_its_level_and_writes_no_infinity() -> None:
    found = {"a": (7, np.inf, 0.005), "b": (8, -np.inf, 0.5), "c": (9, 1.5, 0.01)}
    first, second, third = hypothesis_tests.family(found, level=0.02)
    largest = float(np.finfo(np.float64).max)
    assert (first.name, first.num_observations, first.statistic, first.p_value) == ("a", 7, largest, 0.005)
    assert (second.statistic, third.statistic, third.name) == (-largest, 1.5, "c")
    assert [each.p_value_corrected for each in (first, second, third)] == pytest.approx([0.015, 0.5, 0.02])
    assert [each.reject for each in (first, second, third)] == [True, False, False]  # 0.02 is not below 0.02


def test_a_bias_that_changes_nothing_is_never_seen_and_bounded_by_the_largest_of_its_kind() -> None:
    """The sharpest policy always takes the likeliest token: here it moves 0.2 of the mass, the mean of 0.1 to 0.3."""
    config = LosslessnessConfig(num_replications=5)
    sharper, flatter = hypothesis_tests.detectable_bias(placed(EVEN), num_tests=3, config=config)
    assert sharper.detectable_total_variation == pytest.approx(0.2)
    assert flatter == Power(alternative="flatter", detectable_total_variation=1.0, detectable_fraction=1.0)
    assert sharper.detectable_fraction == 1.0


def test_the_detectable_bias_is_where_enough_replications_see_it() -> None:
    """One impossible token is always seen, so a replication sees every fraction above its smallest random number.

    Of 20 replications 18 must see it (power 0.9): the 18th smallest of these numbers is the fraction that is found.
    """
    draws = placed(EVEN)
    draws.sharper.probability[:] = 0.0
    config = LosslessnessConfig(num_replications=20, seed=11)
    smallest = sorted(np.random.default_rng([11, replication]).random(320).min() for replication in range(20))
    sharper, flatter = hypothesis_tests.detectable_bias(draws, num_tests=3, config=config)
    assert (sharper.alternative, flatter.alternative) == ("sharper", "flatter")
    for found in (sharper, flatter):
        assert smallest[17] < found.detectable_fraction <= 1.021 * smallest[17] + 1e-4
        assert found.detectable_total_variation == pytest.approx(found.detectable_fraction * 0.4)  # mean of 0.2 to 0.6


def test_a_bias_in_the_choice_of_tokens_alone_is_seen_and_the_same_each_time() -> None:
    """Each token is as likely as it should be, and yet all of them come from the first bin."""
    draws = placed(EVEN)
    draws.sharper.mass_before[:] = 0.01
    config = LosslessnessConfig(num_replications=5)
    first, again = (hypothesis_tests.detectable_bias(draws, num_tests=3, config=config) for _ in range(2))
    assert first == again
    assert 0.05 < first[0].detectable_fraction < 0.3


@pytest.mark.parametrize(("num_tests", "seen"), [(1, True), (5, False)])
def test_a_bias_is_sought_at_the_strictest_level_of_the_correction(num_tests: int, seen: bool) -> None:
    """A bias of 3 standard errors has p = 0.0027: below 0.01, above 0.01 / 5."""
    draws, config = placed(EVEN), LosslessnessConfig(num_replications=2, family_level=0.01)
    draws.sharper.probability[:] *= np.exp(3.0 / np.sqrt(320))
    sharper, _ = hypothesis_tests.detectable_bias(draws, num_tests=num_tests, config=config)
    assert (sharper.detectable_fraction < 1.0) is seen
