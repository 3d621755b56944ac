"""How long responses are: a distribution by its quantiles, either a truncated log-normal or what was observed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require

Array = NDArray[np.float64]

_TABLE_LIMIT = 6.0
_TABLE_POINTS = 4001
_MEAN_POINTS = 2000
_BISECTIONS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Response tokens: `quantiles[i]` is the length that a share of (i + 0.5) / N of responses do not exceed."""

    quantiles: tuple[float, ...]  # ascending

    def __post_init__(self) -> None:
        require(len(self.quantiles) > 0, "lengths", "must hold at least one response", 0)
        require(self.quantiles[0] > 0, "lengths", "must be > 0 tokens", self.quantiles[0])
        rising = all(low <= high for low, high in zip(self.quantiles, self.quantiles[1:], strict=False))
        require(rising, "lengths.quantiles", "must ascend", "a fall")

    def at(self, levels: Array) -> Array:
        """Length at each level in (0, 1); beyond the outermost quantile it stays there."""
        count = len(self.quantiles)
        return np.interp(levels, (np.arange(count) + 0.5) / count, np.asarray(self.quantiles))

    @property
    def mean(self) -> float:
        """Mean tokens of a response."""
        return float(np.mean(self.quantiles))

    @property
    def longest(self) -> float:
        """Tokens of the longest response."""
        return self.quantiles[-1]

    def scaled(self, factor: float) -> Lengths:
        """Every response `factor` times as long."""
        return Lengths(quantiles=tuple(factor * value for value in self.quantiles))


def observed(lengths: Sequence[int]) -> Lengths:
    """The distribution of responses that were seen."""
    return Lengths(quantiles=tuple(float(length) for length in sorted(lengths)))


def long_tailed(*, median: float, log_sd: float, max_tokens: float) -> Lengths:
    """A log-normal cut off at `max_tokens`: what is longer is truncated there, as an engine does."""
    require(median > 0, "lengths.median", "must be > 0 tokens", median)
    levels = (np.arange(_MEAN_POINTS) + 0.5) / _MEAN_POINTS
    values = np.minimum(median * np.exp(log_sd * normal_quantile(levels)), max_tokens)
    return Lengths(quantiles=tuple(np.maximum(values, 1.0).tolist()))


def long_tailed_with_mean(*, mean: float, log_sd: float, max_tokens: float) -> Lengths:
    """The `long_tailed` distribution whose mean, truncated responses included, is `mean`.

    Raises:
        ConfigError: the mean is not below `max_tokens`.
    """
    require(0 < mean < max_tokens, "lengths.mean", f"must lie in (0, max_tokens {max_tokens})", mean)
    levels = (np.arange(_MEAN_POINTS) + 0.5) / _MEAN_POINTS
    shape = np.exp(log_sd * normal_quantile(levels))
    low, high = 1e-3, 1e3 * max_tokens
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if np.mean(np.minimum(middle * shape, max_tokens)) < mean else (low, middle)
    return long_tailed(median=math.sqrt(low * high), log_sd=log_sd, max_tokens=max_tokens)


def normal_quantile(levels: Array) -> Array:
    """Inverse of the standard normal distribution function, by table: numpy has none."""
    table, values = _normal_table()
    return np.interp(levels, table, values)


@cache
def _normal_table() -> tuple[Array, Array]:
    values = np.linspace(-_TABLE_LIMIT, _TABLE_LIMIT, _TABLE_POINTS)
    return np.array([0.5 * (1.0 + math.erf(value / math.sqrt(2.0))) for value in values]), values
