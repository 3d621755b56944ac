"""Response lengths, against hand-worked values."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.config import ConfigError
from slipstream.simulator.cost.lengths import (
    Lengths,
    lengths_with_mean,
    log_sd_of_longest,
    log_sd_of_truncation,
    longest_of,
    mean_longest_of,
    stratified,
)


def test_the_longest_of_one_is_the_median() -> None:
    lengths = Lengths(median=100.0, log_sd=0.5, max_tokens=1e6)
    assert longest_of(lengths, 1) == pytest.approx(100.0, rel=1e-3)
    # Half of all pairs lie below level sqrt(1/2) = 0.7071, where the normal quantile is 0.5450.
    assert longest_of(lengths, 2) == pytest.approx(100.0 * np.exp(0.5 * 0.5450), rel=1e-3)


def test_truncation_keeps_the_mean_that_was_asked_for() -> None:
    lengths = lengths_with_mean(mean=600.0, log_sd=1.0, max_tokens=1000.0)
    assert lengths.mean_tokens == pytest.approx(600.0, rel=1e-4)
    assert longest_of(lengths, 10_000) == 1000.0


def test_the_truncated_share_gives_the_spread_back() -> None:
    lengths = lengths_with_mean(mean=70.0, log_sd=0.45, max_tokens=160.0)
    share = float(np.mean(stratified(lengths, 100_000, longest_of_count=100_000) >= 160.0))
    found = log_sd_of_truncation(mean=70.0, max_tokens=160.0, truncated_fraction=share)
    assert found == pytest.approx(0.45, abs=0.005)


def test_the_longest_response_gives_the_spread_back() -> None:
    longest = longest_of(lengths_with_mean(mean=40.0, log_sd=0.2, max_tokens=160.0), 48)
    found = log_sd_of_longest(mean=40.0, max_tokens=160.0, longest=longest, count=48)
    assert found == pytest.approx(0.2, abs=0.001)
    assert log_sd_of_longest(mean=40.0, max_tokens=160.0, longest=40.0, count=48) == pytest.approx(0.01, abs=0.001)
    with pytest.raises(ConfigError, match=r"longest must be >= the mean 40, got 39"):
        log_sd_of_longest(mean=40.0, max_tokens=160.0, longest=39.0, count=48)


def test_the_longest_of_more_responses_is_longer_on_average() -> None:
    lengths = Lengths(median=100.0, log_sd=0.5, max_tokens=1e6)
    assert mean_longest_of(lengths, 1) == pytest.approx(lengths.mean_tokens)
    assert lengths.mean_tokens < mean_longest_of(lengths, 8) < mean_longest_of(lengths, 32)
    assert mean_longest_of(Lengths(median=100.0, log_sd=0.0, max_tokens=100.0), 8) == 100.0
