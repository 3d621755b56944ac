"""Coverage of 95 % intervals on simulated runs: `python -m benchmarks.coverage`. Needs no engine and no finished run.

Steps are simulated with the noise of `recorded_steps.json`: drift, correlation between neighbours, and slow steps are
estimated from each recording. One effect is assumed: a process that burns a core for random minutes and makes all steps
exp(0.5) = 1.65 times as long.

Legend: `R` simulated runs, `N` steps of an arm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.statistics import grouped_ratio, ratio, sum_of_centres, wilson_ci95

STEPS = (5, 8, 12, 24, 100)
TRUE_RATIO = 1.5

_RECORDED = Path(__file__).with_name("recorded_steps.json")
_NUM_RESAMPLES = 400
_OUTLIER = 3.0  # standard deviations
_NORMAL_OUTLIERS = 0.0027  # fraction of a normal distribution beyond `_OUTLIER`

Array = NDArray[np.float64]
Interval = tuple[Array, Array]
Method = Callable[[Array, Array, np.random.Generator], Interval]
"""Function from log seconds [R, N] of baseline and candidate to the ends [R] of the intervals of their log ratio."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Noise of log step seconds. Standard deviations are natural logarithms: 0.1 is about 10 %."""

    own_sd: float  # noise of a single step
    own_correlation: float  # correlation of that noise in neighbouring turns of an arm
    drift_sd: float  # noise of the machine's speed, which all arms share
    drift_correlation: float  # correlation of the speed between neighbouring turns
    work_sd: float  # noise of the cost of a step's prompts, which paired steps share
    slow_rate: float  # fraction of steps that other load slows down
    slow_size: float  # mean slowdown of such a step, exponentially distributed
    burn_size: float = 0.0  # slowdown of all steps while a process burns a core, half of the time
    burn_turns: float = 20.0  # mean number of turns with, and without, such a process

    def sample(self, num: int, num_steps: int, random: np.random.Generator, *, in_turn: bool) -> tuple[Array, Array]:
        """Sample log seconds [R, N] of two arms, the first slower by `TRUE_RATIO`."""
        length = 2 * num_steps
        drift = self.drift_sd * _autoregressive(num, length, np.sqrt(self.drift_correlation), random)
        drift += self.burn_size * _on_and_off(num, length, 2 * self.burn_turns, random)
        turns = np.arange(length).reshape(num_steps, 2)
        turns[1::2] = turns[1::2, ::-1]  # the order within a pair alternates
        columns = turns.T if in_turn else np.arange(length).reshape(2, num_steps)
        work = self.work_sd * random.normal(size=(num, num_steps))
        arms = []
        for column in columns:
            own = self.own_sd * _autoregressive(num, num_steps, self.own_correlation, random)
            slow = (random.random((num, num_steps)) < self.slow_rate) * random.exponential(
                self.slow_size, size=(num, num_steps)
            )
            arms.append(work + drift[:, column] + own + slow)
        return arms[0] + np.log(TRUE_RATIO), arms[1]


def read_noise(arms: Mapping[str, Any], seconds: str = "step_s") -> Noise:
    """Estimate the noise from recorded steps of two arms in turn.

    The median absolute deviation of the ratio within a pair gives the noise of single steps; ratios beyond three
    standard deviations are slow steps. Covariances from pair to pair give the drift, and the rest of the arms'
    covariance within a pair gives the noise of the step's work.
    """
    base, cand = (np.log(arm[seconds]) for arm in arms.values())
    ratios = base - cand - np.median(base - cand)
    scale = _scale(ratios)
    is_slow = np.abs(ratios) > _OUTLIER * scale
    base, cand, kept = map(_clipped, (base, cand, ratios))
    near, far = (float(np.mean([_covariance(x, y, lag) for x in (base, cand) for y in (base, cand)])) for lag in (1, 3))
    near = max(near, 0.0)
    correlation = float(np.sqrt(np.clip(far / near, 0.25, 0.98))) if near else 0.0  # of a turn: two lie between them
    drift = near / correlation if near else 0.0
    work = max(0.0, _covariance(base, cand, 0) - drift * np.sqrt(correlation))
    return Noise(
        own_sd=float(scale / np.sqrt(2)),
        own_correlation=max(0.0, _covariance(kept, kept, 1) / _covariance(kept, kept, 0)),
        drift_sd=float(np.sqrt(drift)),
        drift_correlation=correlation,
        work_sd=float(np.sqrt(work)),
        slow_rate=max(0.0, float(is_slow.mean()) - _NORMAL_OUTLIERS) / 2,
        slow_size=float(np.abs(ratios[is_slow]).mean()) if is_slow.any() else 0.0,
    )


def _autoregressive(num: int, length: int, correlation: float, random: np.random.Generator) -> Array:
    """Sample series [R, length] of variance 1 with a given correlation of neighbours."""
    values = random.normal(size=(num, length))
    for column in range(1, length):
        values[:, column] *= np.sqrt(1 - correlation**2)
        values[:, column] += correlation * values[:, column - 1]
    return values


def _on_and_off(num: int, length: int, mean_length: float, random: np.random.Generator) -> Array:
    """Sample series [R, length] of 0 and 1 that change after `mean_length` entries on average."""
    changes = random.random((num, length)) < 1 / mean_length
    changes[:, 0] = random.random(num) < 0.5
    return (np.cumsum(changes, axis=1) % 2).astype(np.float64)


def _scale(values: Array) -> float:
    """Estimate a normal standard deviation from the median absolute deviation of `values`."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _clipped(values: Array) -> Array:
    middle, reach = np.median(values), _OUTLIER * _scale(values)
    return np.clip(values, middle - reach, middle + reach)


def _covariance(first: Array, second: Array, lag: int) -> float:
    one, other = first - first.mean(), second - second.mean()
    return float(np.mean(one[: len(one) - lag] * other[lag:]))


def _own(base: Array, cand: Array, _: np.random.Generator, *, paired: bool) -> Interval:
    """Compute intervals of `slipstream.statistics.ratio`."""
    found = [ratio(np.exp(b), np.exp(c), paired=paired).ci95 for b, c in zip(base, cand, strict=True)]
    low, high = np.log(np.array(found, dtype=np.float64)).T
    return low, high


def _t(base: Array, cand: Array, _: np.random.Generator) -> Interval:
    found = [sum_of_centres((row,)).ci95 for row in base - cand]
    low, high = np.array(found, dtype=np.float64).T
    return low, high


def _medians(base: Array, cand: Array, random: np.random.Generator) -> Interval:
    """Percentile bootstrap of the ratio of medians, resampled over pairs."""

    def interval(base_N: Array, cand_N: Array) -> Array:
        rows = random.integers(len(base_N), size=(_NUM_RESAMPLES, len(base_N)))
        return np.percentile(np.median(base_N[rows], axis=1) - np.median(cand_N[rows], axis=1), [2.5, 97.5])

    return _each(interval, base, cand)


def _bootstrap_t(base: Array, cand: Array, random: np.random.Generator) -> Interval:
    """Compute bootstrap-t intervals of the mean log ratio, resampled over pairs."""

    def interval(base_N: Array, cand_N: Array) -> Array:
        logs_N = base_N - cand_N
        num, mean, error = len(logs_N), logs_N.mean(), logs_N.std(ddof=1) / np.sqrt(len(logs_N))
        drawn = logs_N[random.integers(num, size=(_NUM_RESAMPLES, num))]
        errors = np.maximum(drawn.std(axis=1, ddof=1) / np.sqrt(num), 1e-9 * error)
        return mean - error * np.percentile((drawn.mean(axis=1) - mean) / errors, [97.5, 2.5])

    return _each(interval, base, cand)


def _moving_blocks(base: Array, cand: Array, random: np.random.Generator) -> Interval:
    """Compute percentile bootstrap intervals of the mean log ratio over overlapping blocks of N^(1/3) pairs."""

    def interval(base_N: Array, cand_N: Array) -> Array:
        logs_N = base_N - cand_N
        size = max(2, round(len(logs_N) ** (1 / 3)))
        starts = random.integers(len(logs_N) - size + 1, size=(_NUM_RESAMPLES, -(-len(logs_N) // size)))
        rows = (starts[:, :, None] + np.arange(size)).reshape(_NUM_RESAMPLES, -1)[:, : len(logs_N)]
        return np.percentile(logs_N[rows].mean(axis=1), [2.5, 97.5])

    return _each(interval, base, cand)


def _each(interval: Callable[[Array, Array], Array], base: Array, cand: Array) -> Interval:
    low, high = np.array([interval(b, c) for b, c in zip(base, cand, strict=True)]).T
    return low, high


METHODS: dict[str, Method] = {
    "bootstrap of medians": _medians,
    "bootstrap-t": _bootstrap_t,
    "moving-block bootstrap": _moving_blocks,
    "t of log ratios": _t,
    "trimmed t, as reported": partial(_own, paired=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Intervals of many runs: the fraction that holds the truth, and their median width as a ratio."""

    held: float
    width: float


def coverage(method: Method, noise: Noise, num_steps: int, *, num_runs: int, in_turn: bool = True) -> Coverage:
    """Measure the coverage of a method on `num_runs` simulated runs of `TRUE_RATIO`."""
    random = np.random.default_rng(0)
    low, high = method(*noise.sample(num_runs, num_steps, random, in_turn=in_turn), random)
    truth = np.log(TRUE_RATIO)
    return Coverage(
        held=float(np.mean((low <= truth) & (truth <= high))), width=float(np.median(np.exp(high) - np.exp(low)))
    )


def proportion_coverage(num_problems: int, samples: int, accuracy: float, *, num_runs: int) -> tuple[float, float]:
    """Measure the coverage of an accuracy by `wilson_ci95` and by a percentile bootstrap over problems.

    Success rates of problems have a beta distribution, in which two samples of a problem correlate by a half.
    """
    random = np.random.default_rng(0)
    held = np.zeros(2)
    for _ in range(num_runs):
        rates = random.binomial(samples, random.beta(accuracy, 1 - accuracy, size=num_problems)) / samples
        drawn = rates[random.integers(num_problems, size=(_NUM_RESAMPLES, num_problems))].mean(axis=1)
        for column, (low, high) in enumerate((wilson_ci95(rates.tolist()), np.percentile(drawn, [2.5, 97.5]))):
            held[column] += low <= accuracy <= high
    return float(held[0] / num_runs), float(held[1] / num_runs)


def grouped_coverage(noise: Noise, num_groups: int, num_steps: int, *, num_runs: int, between: float) -> Coverage:
    """Measure the coverage of `grouped_ratio` on groups whose log ratios have a standard deviation of `between`."""
    random = np.random.default_rng(0)
    held, widths = 0, []
    for _ in range(num_runs):
        base, cand = noise.sample(num_groups, num_steps, random, in_turn=True)
        base += between * random.normal(size=(num_groups, 1))
        groups = [ratio(np.exp(b), np.exp(c), paired=True) for b, c in zip(base, cand, strict=True)]
        low, high = grouped_ratio(groups).ci95 or (np.nan, np.nan)
        held += low <= TRUE_RATIO <= high
        widths.append(high - low)
    return Coverage(held=held / num_runs, width=float(np.median(widths)))


def main() -> None:
    """Print the noise of each recording, and the coverage of each method under that noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="simulated runs a cell")
    num_runs = parser.parse_args().runs
    for recording in json.loads(_RECORDED.read_text())["recordings"]:
        arms = recording["arms"]
        seconds = "step_s" if "step_s" in next(iter(arms.values())) else "generation_s"
        noise = read_noise(arms, seconds)
        _show(f"{recording['name']}: {recording['from']}", noise, num_runs)
        if recording["in_turn"]:
            _show(f"{recording['name']}, and a core burns for random minutes", replace(noise, burn_size=0.5), num_runs)
    print("\nproportions: held by Wilson's, by a bootstrap over problems; 30 problems, two samples of one alike by 0.5")
    for accuracy in (0.02, 0.1, 0.3, 0.5):
        found = [proportion_coverage(30, samples, accuracy, num_runs=num_runs) for samples in (1, 4, 32)]
        cells = "".join(f"{100 * wilson:10.1f}{100 * bootstrap:7.1f}" for wilson, bootstrap in found)
        print(f"  accuracy {accuracy:<5}{cells}   (1, 4 and 32 samples a problem)")


def _show(name: str, noise: Noise, num_runs: int) -> None:
    print(f"\n{name}\n  {noise}\n  {'% that hold the truth, and median width':40}", end="")
    print("".join(f"{f'{num} steps':>15}" for num in STEPS))
    rows = [(method, each, True) for method, each in METHODS.items()]
    rows += [("one arm after the other, unpaired", partial(_own, paired=False), False)]
    for label, method, in_turn in rows:
        found = [coverage(method, noise, num, num_runs=num_runs, in_turn=in_turn) for num in STEPS]
        print(f"  {label:40}" + "".join(f"{100 * each.held:9.1f}{each.width:6.2f}" for each in found))
    for num in (2, 3, 5):
        found = [grouped_coverage(noise, num, 22, num_runs=num_runs, between=sd) for sd in (0.0, 0.05)]
        cells = "".join(f"{100 * each.held:9.1f}{each.width:6.2f}" for each in found)
        print(f"  {f'{num} seeds of 22 steps':40}{cells}   (true ratios alike; sd 0.05)")


if __name__ == "__main__":
    main()
