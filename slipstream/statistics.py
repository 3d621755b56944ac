"""Summaries of repeated timings: percentiles, and ratios of two arms with a bootstrap interval.

Legend: `N` steps of the baseline, `M` steps of the candidate, `R` resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Statistic = Callable[..., NDArray[np.float64]]
"""Reduces the last axis, as `np.median` and `np.mean` do with `axis=-1`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median with the 10th and the 90th percentile, linearly interpolated."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and its 95 % interval; the interval is None when one observation an arm gives none."""

    value: float
    ci95: tuple[float, float] | None


def spread(values: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile of `values`.

    Raises:
        ValueError: `values` is empty.
    """
    _check_not_empty(values)
    p10, median, p90 = np.percentile(np.asarray(values, dtype=np.float64), [10, 50, 90])
    return Spread(median=float(median), p10=float(p10), p90=float(p90))


def bootstrap_ratio(
    baseline_N: Sequence[float],
    candidate_M: Sequence[float],
    *,
    paired: bool,
    statistic: Statistic = np.median,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """`statistic(baseline) / statistic(candidate)` with its 95 % percentile interval, resampled over steps.

    Args:
        baseline_N: positive; seconds of the slower arm make the ratio a speedup.
        paired: entry i of both belongs to the same step, so both are resampled with the same indices and what
            the step has in common (its prompts, how busy the machine is) cancels.
    Raises:
        ValueError: an arm is empty, a candidate is not positive, or `paired` with N != M.
    Source:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    _check_not_empty(baseline_N)
    _check_not_empty(candidate_M)
    base_N = np.asarray(baseline_N, dtype=np.float64)
    cand_M = np.asarray(candidate_M, dtype=np.float64)
    if not cand_M.min() > 0:
        raise ValueError(f"candidate must be > 0 in every step, got {cand_M.min()}")
    if paired and len(base_N) != len(cand_M):
        raise ValueError(f"paired arms must have equally many steps, got {len(base_N)} and {len(cand_M)}")
    value = float(statistic(base_N, axis=-1) / statistic(cand_M, axis=-1))
    if min(len(base_N), len(cand_M)) < 2:
        return Estimate(value=value, ci95=None)
    random = np.random.default_rng(seed)
    base_indices_RN = random.integers(len(base_N), size=(num_resamples, len(base_N)))
    cand_indices_RM = base_indices_RN if paired else random.integers(len(cand_M), size=(num_resamples, len(cand_M)))
    ratios_R = statistic(base_N[base_indices_RN], axis=-1) / statistic(cand_M[cand_indices_RM], axis=-1)
    low, high = np.percentile(ratios_R, [2.5, 97.5])
    return Estimate(value=value, ci95=(float(low), float(high)))


def bootstrap_difference(
    baseline_N: Sequence[float], candidate_N: Sequence[float], *, num_resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """`mean(candidate - baseline)` over pairs with its 95 % percentile interval, resampled over pairs.

    Raises:
        ValueError: an arm is empty, or the arms differ in length.
    """
    _check_not_empty(baseline_N)
    if len(baseline_N) != len(candidate_N):
        raise ValueError(f"paired arms must have equally many steps, got {len(baseline_N)} and {len(candidate_N)}")
    differences_N = np.asarray(candidate_N, dtype=np.float64) - np.asarray(baseline_N, dtype=np.float64)
    value = float(differences_N.mean())
    if len(differences_N) < 2:
        return Estimate(value=value, ci95=None)
    indices_RN = np.random.default_rng(seed).integers(len(differences_N), size=(num_resamples, len(differences_N)))
    low, high = np.percentile(differences_N[indices_RN].mean(axis=-1), [2.5, 97.5])
    return Estimate(value=value, ci95=(float(low), float(high)))


def bootstrap_grouped_ratio(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, num_resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """Geometric mean over groups of `median(baseline) / median(candidate)`, with its 95 % percentile interval.

    Groups are resampled and, within each that is drawn, its steps: what differs from seed to seed is part of the
    interval. Of a few groups it is a rough one. One group gives what `bootstrap_ratio` gives.

    Args:
        pairs: (baseline, candidate) of each group. Arms of equal length are paired by step.
    Raises:
        ValueError: there is no group, or `bootstrap_ratio` refuses one.
    """
    _check_not_empty(pairs)
    each = [
        bootstrap_ratio(base, cand, paired=len(base) == len(cand), num_resamples=1, seed=seed) for base, cand in pairs
    ]
    value = float(np.exp(np.mean([np.log(estimate.value) for estimate in each])))
    if len(pairs) == 1:
        base, cand = pairs[0]
        return bootstrap_ratio(base, cand, paired=len(base) == len(cand), num_resamples=num_resamples, seed=seed)
    random = np.random.default_rng(seed)
    logs_R = np.zeros(num_resamples)
    for _ in pairs:  # as many draws of a group as there are groups
        drawn_R = random.integers(len(pairs), size=num_resamples)
        for group, (base, cand) in enumerate(pairs):
            is_drawn_R = drawn_R == group
            logs_R[is_drawn_R] += _resampled_log_ratios(base, cand, random, int(is_drawn_R.sum()))
    low, high = np.percentile(np.exp(logs_R / len(pairs)), [2.5, 97.5])
    return Estimate(value=value, ci95=(float(low), float(high)))


def _resampled_log_ratios(
    baseline_N: Sequence[float], candidate_M: Sequence[float], random: np.random.Generator, num: int
) -> NDArray[np.float64]:
    """`num` logarithms of the ratio of medians, each of resampled steps; arms of equal length share their indices."""
    base_N, cand_M = np.asarray(baseline_N, dtype=np.float64), np.asarray(candidate_M, dtype=np.float64)
    base_indices = random.integers(len(base_N), size=(num, len(base_N)))
    paired = len(base_N) == len(cand_M)
    cand_indices = base_indices if paired else random.integers(len(cand_M), size=(num, len(cand_M)))
    return np.log(np.median(base_N[base_indices], axis=-1)) - np.log(np.median(cand_M[cand_indices], axis=-1))


def amdahl(share: float, speedup: float) -> float:
    """Speedup of the whole when a part of `share` becomes `speedup` times as fast.

    Raises:
        ValueError: the share is not in [0, 1] or the speedup not positive.
    Source:
        Amdahl, AFIPS 30 (1967) 483.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must lie in [0, 1], got {share}")
    if not speedup > 0:
        raise ValueError(f"speedup must be > 0, got {speedup}")
    return 1 / (share / speedup + 1 - share)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean over at most `window` entries centred on each one; at the ends over those that exist."""
    if window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    left, right = (window - 1) // 2, window // 2
    return [float(np.mean(values[max(0, i - left) : i + right + 1])) for i in range(len(values))]


def _check_not_empty(values: Sequence[object]) -> None:
    if len(values) == 0:
        raise ValueError("values must hold at least one observation, got none")
