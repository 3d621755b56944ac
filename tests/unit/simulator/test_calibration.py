"""Acceptance by position, and least squares with priors."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import yaml

from slipstream.catalog import CONFIGS
from slipstream.simulator import Array, calibration
from slipstream.simulator.calibration import AcceptanceProfile, fit_posterior, fit_profile
from slipstream.types import Workload

PAPER: dict[str, Any] = yaml.safe_load((CONFIGS / "reference" / "paper.yaml").read_text())["workloads"]


def test_acceptance_length_counts_the_bonus_token_and_rates_fall_with_the_position_on_the_logit_scale() -> None:
    # sigmoid(0) = 1/2, sigmoid(-log 3) = 1/4.
    profile = AcceptanceProfile(level=0.0, fall=float(np.log(3.0)))
    assert profile.length(2) == pytest.approx(1.0 + 0.5 + 0.125)
    assert profile.length(0) == 1.0


@pytest.mark.parametrize("workload", Workload)
def test_rates_by_position_fit_the_papers_lengths_and_a_constant_rate_does_not(workload: Workload) -> None:
    lengths = {k: each["mean_acceptance_length"] for k, each in PAPER[workload]["draft_lengths"].items()}
    profile = fit_profile(lengths)
    assert all(profile.length(k) == pytest.approx(length, abs=0.05) for k, length in lengths.items())
    assert profile.fall > 0
    # One rate r for all positions that meets k = 3: 1 + r + r^2 + r^3 = its length.
    rate = next(root.real for root in np.roots([1, 1, 1, 1 - lengths[3]]) if abs(root.imag) < 1e-9)
    constant = AcceptanceProfile(level=float(np.log(rate / (1 - rate))), fall=0.0)
    assert constant.length(3) == pytest.approx(lengths[3])
    assert constant.length(7) > lengths[7] + 0.15


def test_the_solver_finds_a_line_and_its_covariance_keeps_a_prior_and_follows_a_bent_valley() -> None:
    x, y = np.arange(5.0), np.array([1.0, 3.0, 5.0, 7.0, 9.0])
    found = fit_posterior(lambda p: p[0] + p[1] * x - y, np.zeros(2), np.array([1e6, 1e6]))
    assert found.mode == pytest.approx([1.0, 2.0], abs=1e-6)
    # (X'X)^-1 of a line through x = 0..4: [[0.6, -0.2], [-0.2, 0.1]].
    assert found.covariance == pytest.approx(np.array([[0.6, -0.2], [-0.2, 0.1]]), abs=1e-4)
    found = fit_posterior(lambda p: np.array([p[0] - 3.0]), np.zeros(2), np.array([10.0, 0.5]))
    assert found.mode[1] == pytest.approx(0.0, abs=1e-9)
    assert found.covariance[1, 1] == pytest.approx(0.25, rel=1e-6)

    # Rosenbrock's function, from its usual start; its minimum is at (1, 1).
    def residuals(p: Array) -> Array:
        return np.array([10.0 * (p[1] - p[0] ** 2), 1.0 - p[0]])

    found = fit_posterior(residuals, np.array([-1.2, 1.0]), np.array([1e4, 1e4]))
    assert found.mode == pytest.approx([1.0, 1.0], abs=1e-6)


def test_a_fit_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(calibration, "least_squares", partial(calibration.least_squares, max_nfev=1))
    fit_posterior(lambda p: np.exp(p) - 3.0, np.zeros(1), np.array([10.0]))
    assert "the fit stopped before its minimum" in caplog.text
