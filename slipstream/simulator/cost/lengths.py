"""How long responses are: a truncated log-normal, of which the mean and the spread are known or fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np

from slipstream.config import Checked, NonNegativeFloat, Rule, ge, require
from slipstream.simulator.cost import Array

_BISECTIONS = 60
_NORMAL_VALUES = np.linspace(-6.0, 6.0, 4001)
_NORMAL_LEVELS = np.array([0.5 * (1.0 + math.erf(value / math.sqrt(2.0))) for value in _NORMAL_VALUES])
_LEVELS = (np.arange(512) + 0.5) / 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths(Checked, path="lengths"):
    """A log-normal cut off at `max_tokens`: what is longer is truncated there, as an engine does."""

    median: Annotated[float, Rule("must be > 0 tokens", lambda tokens: tokens > 0)]
    log_sd: NonNegativeFloat
    max_tokens: Annotated[float, ge(1)]

    def at(self, levels: Array) -> Array:
        """Length that a share `levels` in (0, 1) of responses do not exceed; rises with the level."""
        return np.clip(self.median * np.exp(self.log_sd * _normal_quantile(levels)), 1.0, self.max_tokens)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a response."""
        return float(np.mean(self.at(_LEVELS)))

    @property
    def mean_square_tokens(self) -> float:
        """Mean of the square of a response's tokens."""
        return float(np.mean(self.at(_LEVELS) ** 2))


@lru_cache(maxsize=64)  # a fit asks again for every parameter that changes no length
def lengths_with_mean(*, mean: float, log_sd: float, max_tokens: float) -> Lengths:
    """The distribution whose mean, truncated responses included, is `mean`.

    A mean of `max_tokens` says that all of them are truncated.

    Raises:
        ConfigError: the mean is above `max_tokens`.
    """
    require(1 <= mean <= max_tokens, "lengths.mean", f"must lie in [1, max_tokens {max_tokens:g}]", mean)
    # Between two medians at which a response reaches 1 or `max_tokens`, the mean is a straight line.
    shape = np.exp(log_sd * _normal_quantile(_LEVELS))
    medians = np.sort(np.concatenate([1.0 / shape, max_tokens / shape]))
    first, last = np.searchsorted(shape, 1.0 / medians), np.searchsorted(shape, max_tokens / medians)
    below = np.append(0.0, np.cumsum(shape))
    means = (first + medians * (below[last] - below[first]) + max_tokens * (len(shape) - last)) / len(shape)
    return Lengths(median=float(np.interp(mean, means, medians)), log_sd=log_sd, max_tokens=max_tokens)


def log_sd_of_truncation(*, mean: float, max_tokens: float, truncated_fraction: float) -> float:
    """The spread that truncates `truncated_fraction` of responses of that mean at `max_tokens`.

    Raises:
        ConfigError: the fraction is not in (0, 0.5): none truncated says only that the spread is small.
    """
    require(0 < truncated_fraction < 0.5, "truncated_fraction", "must lie in (0, 0.5)", truncated_fraction)
    return _log_sd_reaching(max_tokens, level=1.0 - truncated_fraction, mean=mean, max_tokens=max_tokens)


def log_sd_of_longest(*, mean: float, max_tokens: float, longest: float, count: int) -> float:
    """The spread with which the longest of `count` responses of that mean has `longest` tokens, as a median.

    Raises:
        ConfigError: the longest is shorter than the mean.
    """
    require(longest >= mean, "longest", f"must be >= the mean {mean:g}", longest)
    return _log_sd_reaching(longest, level=_median_level_of_longest(count), mean=mean, max_tokens=max_tokens)


def _log_sd_reaching(tokens: float, *, level: float, mean: float, max_tokens: float) -> float:
    """The spread with which a share `level` of responses has at most `tokens`: a wider one has more beyond."""
    z = float(_normal_quantile(np.array([level]))[0])
    low, high = 0.01, 3.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        median = lengths_with_mean(mean=mean, log_sd=middle, max_tokens=max_tokens).median
        low, high = (middle, high) if median * math.exp(middle * z) < tokens else (low, middle)
    return 0.5 * (low + high)


def longest_of(lengths: Lengths, count: int) -> float:
    """Median of the longest of `count` responses."""
    return float(lengths.at(np.array([_median_level_of_longest(count)]))[0])


def mean_longest_of(lengths: Lengths, count: int) -> float:
    """Mean of the longest of `count` responses."""
    return float(np.mean(lengths.at(_LEVELS ** (1.0 / count))))


def stratified(lengths: Lengths, count: int, *, longest_of_count: int) -> Array:
    """`count` typical responses, ascending; the last is the longest of `longest_of_count` >= `count` responses."""
    levels = (np.arange(count) + 0.5) / count
    levels[-1] = max(levels[-1], _median_level_of_longest(longest_of_count))
    return lengths.at(levels)


def _normal_quantile(levels: Array) -> Array:
    """Inverse of the standard normal distribution function, by table: numpy has none."""
    return np.interp(levels, _NORMAL_LEVELS, _NORMAL_VALUES)


def _median_level_of_longest(count: int) -> float:
    # All of `count` lie below level u with chance u^count, which is a half at the median.
    return 0.5 ** (1.0 / count)
