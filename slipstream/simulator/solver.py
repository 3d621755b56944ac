"""Least squares with Gaussian priors, by MINPACK's Levenberg and Marquardt; the evidence and draws around the minimum.

Legend: `P` parameters, `R` residuals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.optimize import least_squares

from slipstream.simulator import Array

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-12  # as far as it goes: a flat direction's last digits would differ between processors
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

    Source: evidence by Laplace's method, MacKay, Neural Computation 4 (1992) 415, equation 2.10.
    """
    found = least_squares(
        partial(_stacked, problem),
        problem.prior,
        method="lm",
        x_scale=problem.prior_sd,
        jac="3-point",  # at a roofline's bend a difference to one side depends on the last bit of the figures
        ftol=_TOLERANCE,
        xtol=_TOLERANCE,
        gtol=_TOLERANCE,
    )
    if not found.success:
        logger.warning("the fit stopped before its minimum: %s", found.message)
    # The priors' rows make the product positive definite.
    covariance = np.asarray(np.linalg.inv(found.jac.T @ found.jac), dtype=np.float64)
    sign, log_volume = np.linalg.slogdet(covariance)
    assert sign > 0
    log_evidence = 0.5 * (log_volume - 2.0 * float(np.sum(np.log(problem.prior_sd)))) - found.cost
    return Solution(solution=found.x, covariance=covariance, log_evidence=float(log_evidence))


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
