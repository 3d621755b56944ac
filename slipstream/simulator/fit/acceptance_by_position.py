"""Acceptance by draft position, and the acceptance length that follows from it for any k.

A rate is conditional: the chance that the draft's token i (from 0) is accepted given that those before were.
AL(k) = 1 + a_0 + a_0 a_1 + ... (k terms): the bonus token counts. One constant rate for all positions would fit one k
and miss the others, so rates fall with the position, on the logit scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.config import require
from slipstream.simulator.cost import Array
from slipstream.simulator.fit.solver import Problem, minimise

# What a profile is before any data: 80 % for the first token, a little less for each that follows.
_PRIOR = np.array([1.4, 0.1])
_PRIOR_SD = np.array([2.0, 0.3])
_LENGTH_SD = 0.02  # an acceptance length is published with two decimals


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceProfile:
    """Conditional rates a_i = sigmoid(level - fall * i), for every position i from 0."""

    level: float
    fall: float

    def rates(self, k: int) -> tuple[float, ...]:
        """Conditional rates of the first `k` positions."""
        return tuple(float(rate) for rate in 1.0 / (1.0 + np.exp(-(self.level - self.fall * np.arange(k)))))

    def length(self, k: int) -> float:
        """Mean acceptance length with `k` draft tokens, the bonus token counted; 1 for k = 0."""
        return acceptance_length(self.rates(k))


def acceptance_length(rates: Sequence[float]) -> float:
    """1 + the expected number of accepted draft tokens, from conditional rates."""
    return 1.0 + float(np.sum(np.cumprod(rates)))


def check_length(k: int, length: float, field: str = "acceptance_length") -> None:
    """Refuse an acceptance length that `k` draft tokens cannot have."""
    require(k >= 0, "k", "must be >= 0", k)
    require(1.0 <= length <= k + 1, field, f"must lie in [1, k + 1 = {k + 1}]", length)


def fit_profile(length_by_k: Mapping[int, float]) -> AcceptanceProfile:
    """The profile whose lengths come nearest to those measured with different k.

    Raises:
        ConfigError: no k >= 1 is given, or a length lies outside [1, k + 1].
    """
    pairs = {k: length for k, length in length_by_k.items() if k > 0}
    require(bool(pairs), "length_by_k", "must hold a draft length k >= 1", dict(length_by_k))
    for k, length in pairs.items():
        check_length(k, length)

    def profile(x: Array) -> AcceptanceProfile:
        return AcceptanceProfile(level=float(x[0]), fall=float(x[1]))

    def residuals(x: Array) -> Array:
        return np.array([(profile(x).length(k) - length) / _LENGTH_SD for k, length in pairs.items()])

    return profile(minimise(Problem(residuals=residuals, prior=_PRIOR, prior_sd=_PRIOR_SD)).solution)
