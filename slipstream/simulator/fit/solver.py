"""Least squares with Gaussian priors, by Levenberg and Marquardt: small, dense, numpy only.

Legend: `P` parameters, `R` residuals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.simulator.cost import Array

_DIFFERENCE = 1e-5
_MAX_STEP = 1.0  # of a parameter on its own scale: logarithms mostly, so e-fold
_MAX_ITERATIONS = 100
_MAX_REFUSALS = 12
_PROPOSALS = 256
_DRAWS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Residuals in units of their own standard deviation, and the prior of each parameter."""

    residuals: Callable[[Array], Array]  # [P] -> [R]
    prior: Array  # [P]
    prior_sd: Array  # [P]


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """The most probable parameters."""

    solution: Array  # [P]
    covariance: Array  # [P, P], the Gauss-Newton (Laplace) approximation
    log_evidence: float  # of the data under this structure, up to a constant that all structures share


def minimise(problem: Problem) -> Solution:
    """Minimise |residuals|^2 + |(x - prior) / prior_sd|^2, starting from the prior.

    Source: Marquardt, SIAM J. Appl. Math. 11 (1963) 431; evidence by Laplace's method, MacKay, Neural Computation 4
        (1992) 415, equation 2.10.
    """
    x = problem.prior.astype(np.float64)
    damping = 1e-2
    residuals = _stacked(problem, x)
    cost = float(residuals @ residuals)
    for _ in range(_MAX_ITERATIONS):
        jacobian = _jacobian(problem, x, residuals)
        hessian, gradient = jacobian.T @ jacobian, jacobian.T @ residuals
        for _ in range(_MAX_REFUSALS):
            step = -np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            tried = x + np.clip(step, -_MAX_STEP, _MAX_STEP)
            new_residuals = _stacked(problem, tried)
            new_cost = float(new_residuals @ new_residuals)
            if new_cost < cost:
                break
            damping *= 4.0
        else:
            break  # no step of any length helps
        gained = cost - new_cost
        x, residuals, cost, damping = tried, new_residuals, new_cost, max(damping / 5.0, 1e-9)
        if gained < 1e-7 * (1.0 + cost):
            break
    jacobian = _jacobian(problem, x, residuals)
    # The priors' rows make the product positive definite.
    covariance = np.asarray(np.linalg.inv(jacobian.T @ jacobian), dtype=np.float64)
    sign, log_volume = np.linalg.slogdet(covariance)
    assert sign > 0
    log_evidence = 0.5 * (log_volume - 2.0 * float(np.sum(np.log(problem.prior_sd))) - cost)
    return Solution(solution=x, covariance=covariance, log_evidence=float(log_evidence))


def sample_posterior(problem: Problem, found: Solution) -> Array:
    """Draws [200, P] of the parameters: the Gaussian's, resampled by how probable they really are.

    Where a roofline bends, the Gaussian puts half its draws where the data would not have them. Weights are truncated
    at sqrt(number of draws) times their mean, so that no draw stands for all.

    Source: Rubin, Bayesian Statistics 3 (1988) 395; Ionides, J. Comput. Graph. Stat. 17 (2008) 295.
    """
    random = np.random.default_rng(0)
    standard = random.standard_normal((_PROPOSALS, len(found.solution)))
    proposed = found.solution + standard @ np.linalg.cholesky(found.covariance).T
    costs = np.array([np.sum(_stacked(problem, x) ** 2) for x in proposed])
    log_weights = 0.5 * (np.sum(standard**2, axis=1) - costs)
    weights = np.exp(log_weights - log_weights.max())
    weights = np.minimum(weights, weights.mean() * np.sqrt(_PROPOSALS))
    return proposed[random.choice(_PROPOSALS, size=_DRAWS, p=weights / weights.sum())]


def _stacked(problem: Problem, x: Array) -> Array:
    return np.concatenate([problem.residuals(x), (x - problem.prior) / problem.prior_sd])


def _jacobian(problem: Problem, x: Array, residuals: Array) -> Array:
    """Forward differences, [R + P, P]."""
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        moved[i] += _DIFFERENCE
        columns.append((_stacked(problem, moved) - residuals) / _DIFFERENCE)
    return np.stack(columns, axis=1)
