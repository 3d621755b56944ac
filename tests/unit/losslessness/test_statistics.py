"""The certificate's statistics: by hand, and on draws from known conditionals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.losslessness import statistics
from slipstream.losslessness.config import LosslessnessConfig
from slipstream.losslessness.statistics import Bias, Draws
from slipstream.policy.conditionals import conditionals

VOCABULARY = 12


def test_an_exact_engine_fails_about_as_often_as_the_family_level_says() -> None:
    """400 families at a level of 10 %: 40 expected at most, and a broken test fails nearly all."""
    random = np.random.default_rng(0)
    rejected = 0
    for _ in range(400):
        draws = exact_draws(600, random)
        found = statistics.conditional_tests(draws, seed=int(random.integers(2**31)))
        rejected += any(finding.reject for finding in statistics.family(found, level=0.1))

    assert rejected <= 60


def test_more_tokens_find_smaller_biases() -> None:
    random = np.random.default_rng(3)
    small, large = (
        statistics.detectable_bias(exact_draws(n, random), num_tests=5, config=LosslessnessConfig(num_replications=10))
        for n in (500, 8000)
    )

    for few, many in zip(small, large, strict=True):
        assert few.alternative == many.alternative
        assert many.detectable_total_variation < 0.6 * few.detectable_total_variation


def exact_draws(num: int, random: np.random.Generator) -> Draws:
    """Draws from their own conditionals, at four positions."""
    logits_NV = torch.tensor(random.normal(size=(num, VOCABULARY)) * 1.5)
    labels = torch.tensor([random.choice(VOCABULARY, p=p) for p in logits_NV.softmax(-1).numpy()])
    generator = torch.Generator().manual_seed(int(random.integers(2**31)))
    c = conditionals(logits_NV, labels, temperature=1.0, top_p=1.0, top_k=0, generator=generator).numpy().T
    return Draws(
        mass_before=c[0],
        probability=c[1],
        logprob_mean=c[2],
        logprob_variance=c[3],
        position=random.integers(0, 4, size=num),
        sharper=Bias(mass_before=c[4], probability=c[5], total_variation=c[6]),
        flatter=Bias(mass_before=c[7], probability=c[8], total_variation=c[9]),
    )


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.02, 0.04 times 3, 2, 1 are 0.03, 0.04, 0.04."""
    assert statistics.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])


def test_chi_square_of_counts_by_hand() -> None:
    """Expected 50, 50: (60 - 50)^2 / 50 + (40 - 50)^2 / 50 = 4."""
    assert statistics.count_test(np.array([60, 40]), np.array([0.5, 0.5])) == (pytest.approx(4.0), 1)


def test_rare_cells_are_pooled() -> None:
    """Expected 94, 3, 3: the last two make one cell of 6."""
    statistic, dof = statistics.count_test(np.array([94, 6, 0]), np.array([0.94, 0.03, 0.03]))

    assert (statistic, dof) == (pytest.approx(0.0), 1)


def test_two_equal_samples_are_homogeneous() -> None:
    assert statistics.homogeneity_test(np.array([30, 70]), np.array([30, 70])) == (pytest.approx(0.0), 1)
    statistic, _ = statistics.homogeneity_test(np.array([60, 40]), np.array([40, 60]))
    assert statistic == pytest.approx(8.0)
