"""Response lengths from a truncated log-normal, and the schedule of continuous batching over these lengths.

Each iteration gives every running sequence the same expected number of tokens. The schedule therefore depends on tokens
alone: one schedule holds for every model, hardware and k.

Legend: `B` sequences of one engine, `S` spans between two changes of the running batch.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from slipstream.config import require
from slipstream.simulator import Array

_BISECTIONS = 60
_NORMAL_VALUES = np.linspace(-6.0, 6.0, 4001)
_NORMAL_LEVELS = np.array([0.5 * (1.0 + math.erf(value / math.sqrt(2.0))) for value in _NORMAL_VALUES])
_LEVELS = (np.arange(512) + 0.5) / 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Log-normal distribution of response lengths, truncated at `max_tokens` as an engine truncates."""

    median: float
    log_sd: float
    max_tokens: float

    def at(self, levels: Array) -> Array:
        """Compute the quantiles of the length at `levels` in (0, 1)."""
        return np.clip(self.median * np.exp(self.log_sd * _normal_quantile(levels)), 1.0, self.max_tokens)

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of a response."""
        return float(np.mean(self.at(_LEVELS)))


@lru_cache(maxsize=64)  # most parameters of a fit do not change lengths
def lengths_with_mean(*, mean: float, log_sd: float, max_tokens: float) -> Lengths:
    """Find the distribution with a given mean, truncated responses included."""
    require(1 <= mean <= max_tokens, "lengths.mean", f"must lie in [1, max_tokens {max_tokens:g}]", mean)
    # Between two medians at which a response reaches 1 or `max_tokens`, the mean is a straight line.
    shape = np.exp(log_sd * _normal_quantile(_LEVELS))
    medians = np.sort(np.concatenate([1.0 / shape, max_tokens / shape]))
    first, last = np.searchsorted(shape, 1.0 / medians), np.searchsorted(shape, max_tokens / medians)
    below = np.append(0.0, np.cumsum(shape))
    means = (first + medians * (below[last] - below[first]) + max_tokens * (len(shape) - last)) / len(shape)
    return Lengths(median=float(np.interp(mean, means, medians)), log_sd=log_sd, max_tokens=max_tokens)


def log_sd_reaching(tokens: float, *, level: float, mean: float, max_tokens: float) -> float:
    """Find the `log_sd` whose quantile at `level` is `tokens`, or comes closest: it rises with the spread, then falls.

    Few responses of equal mean cannot have any longest one. That of few rounds may even lie below the mean of all.
    """
    z = float(_normal_quantile(np.array([level]))[0])

    def quantile(log_sd: float) -> float:
        return lengths_with_mean(mean=mean, log_sd=log_sd, max_tokens=max_tokens).median * math.exp(log_sd * z)

    low, high = 0.01, max(np.linspace(0.01, 3.0, 64).tolist(), key=quantile)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if quantile(middle) < tokens else (low, middle)
    return 0.5 * (low + high)


def longest_of(lengths: Lengths, count: int) -> float:
    """Compute the median of the longest of `count` responses."""
    return float(lengths.at(np.array([level_of_longest(count)]))[0])


def mean_longest_of(lengths: Lengths, count: int) -> float:
    """Compute the mean of the longest of `count` responses."""
    return float(np.mean(lengths.at(_LEVELS ** (1.0 / count))))


def stratified(lengths: Lengths, count: int, *, longest_of_count: int) -> Array:
    """List `count` typical lengths in rising order; the last is the longest of `longest_of_count` responses."""
    levels = (np.arange(count) + 0.5) / count
    levels[-1] = max(levels[-1], level_of_longest(longest_of_count))
    return lengths.at(levels)


def _normal_quantile(levels: Array) -> Array:
    """Interpolate the standard normal quantile function in a table, because numpy has no such function."""
    return np.interp(levels, _NORMAL_LEVELS, _NORMAL_VALUES)


def level_of_longest(count: int) -> float:
    """Return the level of the median of the longest of `count` responses: all lie below u with probability u^count."""
    return 0.5 ** (1.0 / count)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Schedule of one engine: in span s, `batch_S[s]` sequences run until each has generated `tokens_S[s]` tokens."""

    tokens_S: Array
    batch_S: Array
    context_S: Array  # tokens in the key-value cache, summed over running sequences, mean over the span


class Slots(StrEnum):
    """Event that frees a slot for another group while generation runs beside training."""

    RESPONSE = "response"  # each response that ends: only the lag bounds the number of running groups
    GROUP = "group"  # a whole group that ends: at most prompts x lag groups run at once


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutShape:
    """Responses of a step and the engines that generate them, with at least one response an engine."""

    num_rollouts: int
    num_engines: int
    prompt_tokens: float
    group_size: int = 1
    slots: Slots = Slots.RESPONSE
    cache_tokens: float = math.inf  # capacity of an engine's key-value memory

    @property
    def per_engine(self) -> int:
        """Number of responses of the fullest engine."""
        return -(-self.num_rollouts // self.num_engines)


def mean_context(lengths: Lengths, *, prompt_tokens: float) -> float:
    """Compute the mean number of cached tokens of a running sequence: the prompt plus E[L^2] / (2 E[L]).

    At a random time a running sequence is picked in proportion to its length L, and half of it is generated on average.
    """
    return prompt_tokens + float(np.mean(lengths.at(_LEVELS) ** 2)) / (2.0 * lengths.mean_tokens)


def cached_sequences(lengths: Lengths, shape: RolloutShape) -> float:
    """Compute how many sequences of mean context the key-value memory of an engine holds; at least one."""
    return max(1.0, shape.cache_tokens / mean_context(lengths, prompt_tokens=shape.prompt_tokens))


@lru_cache(maxsize=64)  # the samples of a projection share a few schedules
def slowest_engine(lengths: Lengths, shape: RolloutShape) -> Trace:
    """Schedule the engine that ends last: typical responses and the longest response of all engines."""
    lengths_B = stratified(lengths, shape.per_engine, longest_of_count=shape.num_rollouts)
    shuffled_B = np.random.default_rng(0).permutation(lengths_B)  # lengths are not known before generation
    num_slots = int(min(cached_sequences(lengths, shape), shape.per_engine))
    return batch_in_slots(shuffled_B, prompt_tokens=shape.prompt_tokens, num_slots=num_slots)


def batch_in_slots(lengths_B: Array, *, prompt_tokens: float, num_slots: int) -> Trace:
    """Schedule sequences of `lengths_B` tokens in their order, `num_slots` at a time."""
    free = sorted(lengths_B[:num_slots].tolist())  # time at which each slot becomes free, in tokens since the start
    starts_B = np.zeros(len(lengths_B))
    for index, length in enumerate(lengths_B[num_slots:].tolist(), start=num_slots):
        starts_B[index] = free[0]
        heapq.heapreplace(free, free[0] + length)
    borders, places = np.unique(np.concatenate([starts_B, starts_B + lengths_B]), return_inverse=True)
    middle_S = 0.5 * (borders[1:] + borders[:-1])
    joins = np.repeat([1.0, -1.0], len(lengths_B))  # a sequence joins the batch at its start and leaves it at its end
    batch_S = np.cumsum(np.bincount(places, joins), dtype=np.float64)[:-1]
    started_S = np.cumsum(np.bincount(places, joins * np.tile(starts_B, 2)))[:-1]  # sum over the running sequences
    return Trace(tokens_S=np.diff(borders), batch_S=batch_S, context_S=batch_S * (prompt_tokens + middle_S) - started_S)
