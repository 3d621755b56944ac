"""Least squares with priors, against a line fitted by hand."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from slipstream.simulator.cost import Array
from slipstream.simulator.fit import solver
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


def test_a_bent_valley_is_followed_to_its_end() -> None:
    """Rosenbrock's function, from its usual start; its minimum is at (1, 1)."""

    def residuals(p: Array) -> Array:
        return np.array([10.0 * (p[1] - p[0] ** 2), 1.0 - p[0]])

    found = minimise(Problem(residuals=residuals, prior=np.array([-1.2, 1.0]), prior_sd=np.array([1e4, 1e4])))
    assert found.solution == pytest.approx([1.0, 1.0], abs=1e-6)


def test_a_fit_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(solver, "least_squares", partial(solver.least_squares, max_nfev=1))
    minimise(Problem(residuals=lambda p: np.exp(p) - 3.0, prior=np.zeros(1), prior_sd=np.array([10.0])))
    assert "the fit stopped before its minimum" in caplog.text
