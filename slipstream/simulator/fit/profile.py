"""The acceptance profile that meets the lengths measured with different k."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slipstream.config import require
from slipstream.simulator.cost.acceptance import AcceptanceProfile, check_length
from slipstream.simulator.fit.solver import Problem, minimise

# What a profile is before any data: 80 % for the first token, a little less for each that follows.
_PRIOR = np.array([1.4, 0.1])
_PRIOR_SD = np.array([2.0, 0.3])
_LENGTH_SD = 0.02  # an acceptance length is published with two decimals


def fit_profile(length_by_k: Mapping[int, float]) -> AcceptanceProfile:
    """The profile whose lengths come nearest to those measured with different k.

    Raises:
        ConfigError: no k >= 1 is given, or a length lies outside [1, k + 1].
    """
    pairs = {k: length for k, length in length_by_k.items() if k > 0}
    require(bool(pairs), "length_by_k", "must hold a draft length k >= 1", dict(length_by_k))
    for k, length in pairs.items():
        check_length(k, length)

    def residuals(x: np.ndarray) -> np.ndarray:
        profile = AcceptanceProfile(level=float(x[0]), fall=float(x[1]))
        return np.array([(profile.length(k) - length) / _LENGTH_SD for k, length in pairs.items()])

    found = minimise(Problem(residuals=residuals, prior=_PRIOR, prior_sd=_PRIOR_SD)).solution
    return AcceptanceProfile(level=float(found[0]), fall=float(found[1]))
