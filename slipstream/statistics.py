"""Summaries of repeated timings and rates: percentiles, and ratios, differences and proportions with intervals.

`python -m benchmarks.coverage` measures how often the intervals hold the truth on recorded noise.

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
"""Smallest number of timed steps with an interval, and so with a verdict."""
TRIM = 0.1
"""Fraction of the log ratios that is trimmed at each end."""
WIDENING = 1.05
"""Factor on the standard error of a ratio, for a correlation of 0.05 between neighbours: sqrt(1.05 / 0.95)."""

_MIN_PROBLEMS = 5  # problems with right samples, and with wrong ones, below which their variance is not trusted


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median with the 10th and the 90th percentile, linearly interpolated."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and its 95 % interval; None below `MIN_STEPS` observations an arm."""

    value: float
    ci95: tuple[float, float] | None


def spread(values: Sequence[float]) -> Spread:
    """Compute median, 10th and 90th percentile."""
    p10, median, p90 = np.percentile(_observed(values), [10, 50, 90])
    return Spread(median=float(median), p10=float(p10), p90=float(p90))


def ratio(baseline_N: Sequence[float], candidate_M: Sequence[float], *, paired: bool) -> Estimate:
    """Estimate the typical ratio of the baseline to the candidate, with an interval from `MIN_STEPS` steps on.

    The estimand is exp of the centre of a step's log ratio. The estimate is exp of the trimmed mean of the log ratios,
    so outlier steps change it little. The interval is Yuen's t, widened by `WIDENING`.

    Args:
        baseline_N: seconds of the slower arm make the ratio a speedup. A step of 0 seconds has no logarithm; the
            estimate is then the ratio of the means, without an interval.
        paired: entries i of both arms ran in the same turn, so common effects (prompts, load of the machine) cancel.
            For arms that ran one after the other, drift between them enters the value and is missing from the
            interval.
    Source: Yuen, Biometrika 61 (1974) 165; for one sample Tukey and McLaughlin, Sankhya A 25 (1963) 331.
    """
    base_N, cand_M = _observed(baseline_N), _observed(candidate_M)
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
    """Estimate the geometric mean of the groups' ratios, with the t interval of their logarithms.

    Differences between groups (their seeds, say) are part of the interval, so two or three groups give a wide one. A
    single group keeps its own interval. If any group has no interval, neither has the result.
    """
    values = _observed([each.value for each in ratios])
    if len(ratios) == 1 or values.min() == 0:
        return Estimate(value=float(values.prod()), ci95=ratios[0].ci95)
    found = _exp(sum_of_centres((np.log(values),), min_values=2))
    return found if all(each.ci95 for each in ratios) else Estimate(value=found.value, ci95=None)


def difference(baseline_N: Sequence[float], candidate_N: Sequence[float]) -> Estimate:
    """Estimate the mean of candidate - baseline over pairs, with a t interval from `MIN_STEPS` pairs on.

    Equal differences, such as rewards that are all 0, do not show their spread and give no interval.
    """
    base_N, cand_N = _observed(baseline_N), _observed(candidate_N)
    _check_paired(base_N, cand_N)
    found = sum_of_centres((cand_N - base_N,))
    return found if np.ptp(cand_N - base_N) > 1e-12 else Estimate(value=found.value, ci95=None)


def wilson_ci95(rates_N: Sequence[float]) -> tuple[float, float]:
    """Wilson's interval of the mean of `rates_N`, one rate a problem; 0 of N has a positive width too.

    Samples of one problem are correlated, so the effective number of samples is the one that gives the mean the
    variance between problems. It is at most N where fewer than five problems have a right sample, or a wrong one. The
    quantile is Student's t with N - 1 degrees of freedom, for that variance is an estimate.

    Source: Wilson, JASA 22 (1927) 209; for clustered samples Korn and Graubard, Survey Methodology 24 (1998) 193.
    """
    rates = _observed(rates_N)
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


def reward_ci95(rewards_N: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean of `rewards_N`, one mean reward a prompt, whose rollouts are correlated.

    It is Wilson's for rewards in [0, 1], which has a positive width for 0 of N, and the t interval for other rewards.
    None for fewer than two prompts, or where the t interval has no width.
    """
    rewards = np.asarray(rewards_N, dtype=np.float64)
    if len(rewards) < 2:
        return None
    if rewards.min() >= 0 and rewards.max() <= 1:
        return wilson_ci95(rewards_N)
    return sum_of_centres((rewards,)).ci95 if np.ptp(rewards) > 1e-12 else None


def sum_of_centres(
    samples: Sequence[NDArray[np.float64]], *, trim: float = 0.0, widening: float = 1.0, min_values: int = MIN_STEPS
) -> Estimate:
    """Estimate the sum of the samples' trimmed means, with a t interval (Welch's degrees of freedom for two samples).

    Args:
        trim: fraction that is trimmed at each end, rounded down to whole values.
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
    """Return the speedup of the whole if a part of `share` becomes `speedup` times as fast (Amdahl 1967)."""
    return 1 / (share / speedup + 1 - share)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Average at most `window` entries centred on each one; at the ends those that exist."""
    left, right = (window - 1) // 2, window // 2
    return [float(np.mean(values[max(0, i - left) : i + right + 1])) for i in range(len(values))]


def _check_paired(base_N: NDArray[np.float64], cand_M: NDArray[np.float64]) -> None:
    if len(base_N) != len(cand_M):
        raise ValueError(f"paired arms must have equally many steps, got {len(base_N)} and {len(cand_M)}")


def _observed(values: Sequence[float]) -> NDArray[np.float64]:
    if len(values) == 0:
        raise ValueError("values must hold at least one observation, got none")
    return np.asarray(values, dtype=np.float64)
