"""Least squares with priors, against a line fitted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.simulator.fit.solver import Problem, minimise


def test_the_solver_finds_a_line_and_its_covariance() -> None:
    x, y = np.arange(5.0), np.array([1.0, 3.0, 5.0, 7.0, 9.0])
    found = minimise(Problem(residuals=lambda p: p[0] + p[1] * x - y, prior=np.zeros(2), prior_sd=np.array([1e6, 1e6])))
    assert found.solution == pytest.approx([1.0, 2.0], abs=1e-6)
    # (X'X)^-1 of a line through x = 0..4: [[0.6, -0.2], [-0.2, 0.1]].
    assert found.covariance == pytest.approx(np.array([[0.6, -0.2], [-0.2, 0.1]]), abs=1e-4)


def test_a_parameter_without_data_stays_at_its_prior() -> None:
    problem = Problem(residuals=lambda p: np.array([p[0] - 3.0]), prior=np.zeros(2), prior_sd=np.array([10.0, 0.5]))
    found = minimise(problem)
    assert found.solution[1] == pytest.approx(0.0, abs=1e-9)
    assert found.covariance[1, 1] == pytest.approx(0.25, rel=1e-6)
