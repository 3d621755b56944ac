"""The noise that is read from steps, and how often intervals hold the truth on it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import coverage as module
from benchmarks.coverage import METHODS, Noise, coverage, grouped_coverage, proportion_coverage, read_noise

QUIET = Noise(
    own_sd=0.05, own_correlation=0.0, drift_sd=0.1, drift_correlation=0.9, work_sd=0.1, slow_rate=0.05, slow_size=1.0
)


def test_the_noise_of_long_arms_is_read_back() -> None:
    base, cand = (np.exp(arm[0]) for arm in QUIET.sample(1, 20_000, np.random.default_rng(1), in_turn=True))
    found = read_noise({"base": {"step_s": base.tolist()}, "cand": {"step_s": cand.tolist()}})
    # Half a turn lies between a pair's steps, so a little of the drift looks like their own noise.
    assert 0.05 < found.own_sd < 0.07
    assert found.own_correlation < 0.05
    assert found.drift_sd == pytest.approx(0.1, abs=0.015)
    assert found.drift_correlation == pytest.approx(0.9, abs=0.05)
    assert found.work_sd == pytest.approx(0.1, abs=0.01)
    assert found.slow_rate == pytest.approx(0.05, abs=0.015)
    assert found.slow_size == pytest.approx(1.0, abs=0.3)  # of what stands out from the rest


def test_the_first_arm_is_slower_by_the_true_ratio_and_arms_in_turn_share_the_drift() -> None:
    noise, spreads = replace(QUIET, slow_rate=0.0), []
    for in_turn in (True, False):
        base, cand = noise.sample(400, 20, np.random.default_rng(2), in_turn=in_turn)
        means = (base - cand).mean(axis=1)
        assert means.mean() == pytest.approx(np.log(module.TRUE_RATIO), abs=0.03)
        spreads.append(means.std())
    assert spreads[0] < 0.5 * spreads[1]


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        ("moving-block bootstrap", 0.5, 0.85),
        ("bootstrap-t", 0.9, 1.0),
        ("t of log ratios", 0.92, 0.98),
        ("trimmed t, as reported", 0.93, 0.985),
        ("bootstrap of medians", 0.9, 0.99),
    ],
)
def test_methods_differ_at_five_steps(method: str, low: float, high: float) -> None:
    noise = replace(QUIET, slow_rate=0.0)
    assert low <= coverage(METHODS[method], noise, 5, num_runs=300).held <= high


def test_proportions_and_groups_hold_about_95_in_100() -> None:
    wilson, bootstrap = proportion_coverage(30, 1, 0.05, num_runs=300)
    assert bootstrap < 0.85 < 0.92 < wilson
    found = grouped_coverage(QUIET, 3, 12, num_runs=300, between=0.1)
    assert 0.92 <= found.held <= 0.985
