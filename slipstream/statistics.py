"""Summaries of repeated timings and of rates: percentiles, and ratios, differences and proportions with intervals.

`python -m benchmarks.coverage` shows how often the intervals hold the truth, on noise as it was recorded.

Legend: `N` steps of the baseline, `M` steps of the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

MIN_STEPS = 5
"""Timed steps below which there is no interval, and so no verdict."""
TRIM = 0.1
"""Fraction of the log ratios that is left out at each end."""
WIDENING = 1.05
"""Factor on the standard error of a ratio: that of a correlation of 0.05 between neighbours, sqrt(1.05 / 0.95)."""

_MIN_PROBLEMS = 5  # with a right sample, and with a wrong one: below, they do not show how they differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median with the 10th and the 90th percentile, linearly interpolated."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and its 95 % interval; the interval is None below `MIN_STEPS` observations an arm."""

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


def ratio(baseline_N: Sequence[float], candidate_M: Sequence[float], *, paired: bool) -> Estimate:
    """Typical ratio of the baseline to the candidate, with its 95 % interval from `MIN_STEPS` steps on.

    The estimand is exp of the centre of the log ratio of a step, and the value exp of the trimmed mean of the log
    ratios: a step that something else slowed down moves it little. The interval is Yuen's t, wider by `WIDENING`.

    Args:
        baseline_N: seconds of the slower arm make the ratio a speedup. A step of 0 seconds has no logarithm: the
            value is then the ratio of the means, without an interval.
        paired: entry i of both was timed in the same turn, so what both have in common (the prompts, how busy the
            machine is) cancels. Arms that ran one after the other are not paired: a drift between them is part of
            the value, and their interval is too narrow for it.
    Raises:
        ValueError: an arm is empty, a candidate is not positive, a baseline is negative, or `paired` with N != M.
    Source:
        Yuen, Biometrika 61 (1974) 165; of one sample Tukey and McLaughlin, Sankhya A 25 (1963) 331.
    """
    _check_not_empty(baseline_N)
    _check_not_empty(candidate_M)
    base_N, cand_M = np.asarray(baseline_N, dtype=np.float64), np.asarray(candidate_M, dtype=np.float64)
    if not cand_M.min() > 0:
        raise ValueError(f"candidate must be > 0 in every step, got {cand_M.min()}")
    if not base_N.min() >= 0:
        raise ValueError(f"baseline must be >= 0 in every step, got {base_N.min()}")
    if paired:
        _check_paired(base_N, cand_M)
    if base_N.min() == 0:
        return Estimate(value=float(base_N.mean() / cand_M.mean()), ci95=None)
    logs = (np.log(base_N) - np.log(cand_M),) if paired else (np.log(base_N), -np.log(cand_M))
    return _exp(sum_of_centres(logs, trim=TRIM, widening=WIDENING))


def grouped_ratio(ratios: Sequence[Estimate]) -> Estimate:
    """Geometric mean of the groups' ratios, with the 95 % t interval of their logarithms.

    How groups differ (their seeds, say) is part of the interval, so two or three groups give a wide one. One group
    keeps its own interval, and a group without one leaves the whole without one.

    Raises:
        ValueError: there is no group.
    """
    _check_not_empty(ratios)
    values = np.array([each.value for each in ratios])
    if len(ratios) == 1 or values.min() == 0:
        return Estimate(value=float(values.prod()), ci95=ratios[0].ci95)
    found = _exp(sum_of_centres((np.log(values),), min_values=2))
    return found if all(each.ci95 for each in ratios) else Estimate(value=found.value, ci95=None)


def difference(baseline_N: Sequence[float], candidate_N: Sequence[float]) -> Estimate:
    """Mean of candidate - baseline over pairs, with its 95 % t interval from `MIN_STEPS` pairs on.

    Differences that are all equal, as rewards that are all 0, say nothing of their spread: they have no interval.

    Raises:
        ValueError: an arm is empty, or the arms differ in length.
    """
    _check_not_empty(baseline_N)
    base_N, cand_N = np.asarray(baseline_N, dtype=np.float64), np.asarray(candidate_N, dtype=np.float64)
    _check_paired(base_N, cand_N)
    found = sum_of_centres((cand_N - base_N,))
    return found if np.ptp(cand_N - base_N) > 1e-12 else Estimate(value=found.value, ci95=None)


def wilson_ci95(rates_N: Sequence[float]) -> tuple[float, float]:
    """Wilson's 95 % interval of the mean of `rates_N`, one rate a problem; it has a width for 0 of N too.

    Samples of one problem are alike, so they count for fewer independent ones: for as many as would give the mean the
    variance that the problems show, and for at most N where fewer than five problems have a right sample, or a wrong
    one. The quantile is of Student's t with N - 1 degrees of freedom, for that variance is an estimate.

    Raises:
        ValueError: there is no rate, or one outside [0, 1].
    Source:
        Wilson, JASA 22 (1927) 209; of clustered samples Korn and Graubard, Survey Methodology 24 (1998) 193.
    """
    _check_not_empty(rates_N)
    rates = np.asarray(rates_N, dtype=np.float64)
    if not (rates.min() >= 0 and rates.max() <= 1):
        raise ValueError(f"rates must lie in [0, 1], got {rates.min()} to {rates.max()}")
    num, mean = len(rates), float(rates.mean())
    variance = float(rates.var(ddof=1)) / num if num > 1 else 0.0
    size = mean * (1 - mean) / variance if variance > 0 else float(num)
    if min((rates > 0).sum(), (rates < 1).sum()) < _MIN_PROBLEMS:
        size = min(size, float(num))
    t2 = float(special.stdtrit(max(1, num - 1), 0.975)) ** 2 / size
    centre = (mean + t2 / 2) / (1 + t2)
    half = math.sqrt(t2 * mean * (1 - mean) + t2 * t2 / 4) / (1 + t2)
    return max(0.0, centre - half), min(1.0, centre + half)


def sum_of_centres(
    samples: Sequence[NDArray[np.float64]], *, trim: float = 0.0, widening: float = 1.0, min_values: int = MIN_STEPS
) -> Estimate:
    """Sum of the samples' trimmed means, with its 95 % t interval (of two samples Welch's degrees of freedom).

    Args:
        trim: fraction that is left out at each end, rounded down to whole values.
    """
    means, squared_errors, degrees = [], [], []
    for sample in samples:
        num, cut = len(sample), int(trim * len(sample))
        ordered_N = np.sort(sample)
        kept = num - 2 * cut
        means.append(float(ordered_N[cut : num - cut].mean()))
        winsorised_N = np.clip(ordered_N, ordered_N[cut], ordered_N[num - 1 - cut])
        squared_errors.append(float(((winsorised_N - winsorised_N.mean()) ** 2).sum()) / (kept * max(1, kept - 1)))
        degrees.append(kept - 1)
    value, variance = sum(means), sum(squared_errors)
    if min(map(len, samples)) < min_values:
        return Estimate(value=value, ci95=None)
    shares = [error / variance if variance > 0 else 1.0 for error in squared_errors]
    freedom = 1 / sum(share**2 / degree for share, degree in zip(shares, degrees, strict=True))
    half = widening * float(special.stdtrit(freedom, 0.975)) * math.sqrt(variance)
    return Estimate(value=value, ci95=(value - half, value + half))


def _exp(logarithm: Estimate) -> Estimate:
    ends = logarithm.ci95 and (math.exp(logarithm.ci95[0]), math.exp(logarithm.ci95[1]))
    return Estimate(value=math.exp(logarithm.value), ci95=ends)


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


def _check_paired(base_N: NDArray[np.float64], cand_M: NDArray[np.float64]) -> None:
    if len(base_N) != len(cand_M):
        raise ValueError(f"paired arms must have equally many steps, got {len(base_N)} and {len(cand_M)}")


def _check_not_empty(values: Sequence[object]) -> None:
    if len(values) == 0:
        raise ValueError("values must hold at least one observation, got none")
