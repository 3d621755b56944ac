"""Hypothesis tests of the losslessness certificate: does speculation sample the policy's own distribution?

The null hypothesis: every token that the speculative engine emits is a sample of the policy's conditional distribution
at the run's temperature, top-p and top-k. The exact conditionals come from the learner, never from the engine under
test.

The tests and their reasons:

- The randomized probability integral transform of a token x is u = F(x-) + v p(x), with v uniform and the vocabulary
  sorted by falling probability. If x is a sample of p given its prefix, u is uniform and independent of all earlier
  tokens (Rosenblatt 1952), for every length of response and batch.
- Each position of the draft window has a test of its own. Given that a position is reached, its token, accepted or
  corrected, is a sample of p. Accepted tokens alone follow min(p, q), and corrected tokens alone are biased as well: a
  test of either against the uniform distribution would reject an exact engine. The bonus token is the last position.
- The logprob of a sampled token has a known mean and variance given its prefix; the sums give a z-score.
- Repeated prompts give counts of first tokens and first pairs, which are compared with exact probabilities.
- A two-sample test compares both engines: rounding differs between learner and engine, but not between engines.

All p-values enter one Holm correction, so an exact engine is rejected with at most the probability `family_level`.
Legend: `N` tokens, `K` cells, `R` replications.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

from slipstream.losslessness.config import LosslessnessConfig
from slipstream.records.stages import Finding, Power

Floats = NDArray[np.float64]
Tests = dict[str, tuple[int, float, float]]
"""Observations, statistic and p-value of each test, by its name."""
_NUM_BINS = 32
_MIN_EXPECTED = 5.0  # smaller cells are pooled: the chi-square approximation needs this many expected counts
_EDGES = np.linspace(0.0, 1.0, _NUM_BINS + 1)
_TINY = float(np.finfo(np.float64).tiny)
_LARGEST = float(np.finfo(np.float64).max)  # JSON knows no infinity, and an impossible token makes a statistic infinite
_MIN_TOKENS = 100  # positions with fewer tokens are pooled into the position before


@dataclass(frozen=True, slots=True)
class Bias:
    """One sample a token of a biased policy, scored by the true policy, and the bias in total variation."""

    mass_before: Floats
    probability: Floats
    total_variation: Floats


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampled tokens with their statistics under the policy, arrays of length N in the order of `logprobs.COLUMNS`.

    `sharper` and `flatter` hold one sample for each of the same prefixes, of a policy with all probabilities squared,
    and of one with their square roots (both normalized). These known biases measure the power of the tests.
    """

    mass_before: Floats  # probability of all likelier tokens; NaN where the policy cannot sample the token
    probability: Floats
    logprob_mean: Floats  # mean logprob of the conditional distribution: minus its entropy
    logprob_variance: Floats
    largest_probability: Floats  # of the conditional distribution
    position: NDArray[np.int64]  # position in the draft window, from 1; 0: sampled without a draft
    sharper: Bias
    flatter: Bias


def uniforms(mass_before: Floats, probability: Floats, seed: int) -> Floats:
    """Compute the randomized probability integral transform, [N] in [0, 1]; an impossible token (NaN) gives 1."""
    v = np.random.default_rng(seed).random(len(probability))
    return np.where(np.isnan(mass_before), 1.0, np.clip(mass_before + v * probability, 0.0, 1.0))


def conditional_tests(draws: Draws, *, seed: int) -> Tests:
    """Test sampled tokens against the policy's conditional distributions."""
    u = uniforms(draws.mass_before, draws.probability, seed)
    counts = np.histogram(u, _EDGES)[0]
    uniform = np.full(_NUM_BINS, 1.0 / _NUM_BINS)
    found = {"pit, all tokens": (len(u), *summed_chi_square([count_test(counts, uniform)]))}
    for position, mask in window_positions(draws.position).items():
        found[f"pit, {position}"] = (int(mask.sum()), *_kolmogorov(u[mask]))
    with np.errstate(divide="ignore"):
        logprob = np.where(draws.probability > 0, np.log(draws.probability), -np.inf)
    z = (logprob - draws.logprob_mean).sum() / np.sqrt(draws.logprob_variance.sum() + _TINY)
    found["log-probability, z"] = (len(u), *_normal(z))
    return found


def window_positions(position: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
    """Build a mask [N] for tokens without a draft and for each position of the window; rare positions are pooled."""
    groups: dict[str, NDArray[np.bool_]] = {}
    last = int(position.max(initial=0))
    for index in np.unique(position):
        mask = position == index
        name = "no draft" if index == 0 else "bonus token" if index == last else f"draft position {index}"
        if mask.sum() < _MIN_TOKENS and groups:
            previous = next(reversed(groups))
            groups[previous] = groups[previous] | mask
        else:
            groups[name] = mask
    return groups


def count_test(counts: NDArray[np.int64], probabilities: Floats) -> tuple[float, int]:
    """Compute Pearson's chi-square of counts against exact probabilities, and its degrees of freedom.

    Args:
        counts: [K] number of samples in each cell.
        probabilities: [K], summing to 1. Cells that expect fewer than 5 samples are pooled.
    """
    expected = probabilities * counts.sum()
    observed, expected = _pool(counts.astype(np.float64), expected)
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


def homogeneity_test(first: NDArray[np.int64], second: NDArray[np.int64]) -> tuple[float, int]:
    """Compute chi-square of two samples' counts [K] and its degrees of freedom; rare cells are pooled."""
    total = (first + second).astype(np.float64)
    share = first.sum() / total.sum()
    smaller = total * min(share, 1 - share)
    pooled_first, _ = _pool(first.astype(np.float64), smaller)
    pooled_total, _ = _pool(total, smaller)
    expected = pooled_total * share
    statistic = ((pooled_first - expected) ** 2 / (pooled_total * share * (1 - share))).sum()
    return float(statistic), len(pooled_total) - 1


def summed_chi_square(parts: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Sum independent chi-square statistics; the p-value is 1 without degrees of freedom."""
    statistic, dof = sum(part[0] for part in parts), sum(part[1] for part in parts)
    return statistic, float(special.chdtrc(dof, statistic)) if dof > 0 else 1.0


def two_sample_tests(first: Draws, second: Draws, *, seed: int) -> Tests:
    """Test whether two engines sample alike, by the uniforms and the logprobs of the tests above."""
    u = [uniforms(draws.mass_before, draws.probability, seed + i) for i, draws in enumerate((first, second))]
    counts = [np.histogram(values, _EDGES)[0] for values in u]
    num = len(u[0]) + len(u[1])
    found = {"autoregressive beside speculative, pit": (num, *summed_chi_square([homogeneity_test(*counts)]))}
    means, variances = [], []
    for draws in (first, second):
        known = draws.probability > 0
        excess = np.log(draws.probability[known]) - draws.logprob_mean[known]
        means.append(excess.mean())
        variances.append(draws.logprob_variance.mean() / len(excess))
    z = (means[0] - means[1]) / np.sqrt(sum(variances))
    found["autoregressive beside speculative, log-probability"] = (num, *_normal(z))
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Apply Holm's step-down correction (1979): reject where the corrected p-value is below the family level."""
    order = np.argsort(p_values)
    scaled = np.arange(len(order), 0, -1) * np.asarray(p_values)[order]
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.minimum(scaled, 1.0))
    return corrected.tolist()


def family(found: Tests, *, level: float) -> tuple[Finding, ...]:
    """Judge all tests under one Holm correction."""
    corrected = holm([p_value for _, _, p_value in found.values()])
    return tuple(
        Finding(
            name=name,
            num_observations=num,
            statistic=float(np.clip(statistic, -_LARGEST, _LARGEST)),
            p_value=p_value,
            p_value_corrected=fixed,
            reject=fixed < level,
        )
        for (name, (num, statistic, p_value)), fixed in zip(found.items(), corrected, strict=True)
    )


def detectable_bias(draws: Draws, *, num_tests: int, config: LosslessnessConfig) -> tuple[Power, ...]:
    """Mix known biases into the recorded samples and find the smallest bias that the tests detect.

    Each token is replaced, with probability f, by the sample of a sharper or flatter policy. f is bisected until a test
    of the conditionals rejects in a fraction `config.power` of the replications, at the strictest level of Holm's
    correction over `num_tests`. A bias that goes unseen even at f = 1 is given its largest total variation instead: a
    sharper policy can be no further away than the one that always takes the likeliest token, a flatter one by 1.
    """
    level = config.family_level / num_tests
    found = []
    furthest = float((1.0 - draws.largest_probability).mean())
    for alternative, bias, variation in (("sharper", draws.sharper, furthest), ("flatter", draws.flatter, 1.0)):
        high = 1.0
        if _power(draws, bias, 1.0, level, config) >= config.power:
            low = 0.0
            while high - low > max(0.02 * high, 1e-4):
                middle = (low + high) / 2
                seen = _power(draws, bias, middle, level, config) >= config.power
                low, high = (low, middle) if seen else (middle, high)
            variation = float(high * bias.total_variation.mean())
        found.append(Power(alternative=alternative, detectable_total_variation=variation, detectable_fraction=high))
    return tuple(found)


def _power(draws: Draws, bias: Bias, fraction: float, level: float, config: LosslessnessConfig) -> float:
    """Fraction of replications in which some test of the conditionals detects the bias."""
    rejected = 0
    for replication in range(config.num_replications):
        random = np.random.default_rng([config.seed, replication])
        replaced = random.random(len(draws.probability)) < fraction
        biased = replace(
            draws,
            mass_before=np.where(replaced, bias.mass_before, draws.mass_before),
            probability=np.where(replaced, bias.probability, draws.probability),
        )
        tests = conditional_tests(biased, seed=int(random.integers(2**31)))
        rejected += min(p_value for _, _, p_value in tests.values()) < level
    return rejected / config.num_replications


def _normal(z: float) -> tuple[float, float]:
    """Pair a standard normal statistic with its two-sided p-value."""
    return float(z), float(special.erfc(abs(z) / np.sqrt(2.0)))


def _kolmogorov(u: Floats) -> tuple[float, float]:
    """Compute the Kolmogorov-Smirnov distance from uniform, and its p-value with Stephens' small-sample correction."""
    ordered = np.sort(u)
    steps = np.arange(1, len(u) + 1) / len(u)
    distance = max(float((steps - ordered).max()), float((ordered - steps + 1 / len(u)).max()))
    root = np.sqrt(len(u))
    return distance, float(special.kolmogorov((root + 0.12 + 0.11 / root) * distance))


def _pool(values: Floats, expected: Floats) -> tuple[Floats, Floats]:
    """Merge cells that expect fewer than `_MIN_EXPECTED` counts, smallest first."""
    order = np.argsort(expected)
    merged = [(0.0, 0.0)]
    for value, mass in zip(values[order].tolist(), expected[order].tolist(), strict=True):
        if merged[-1][1] >= _MIN_EXPECTED:
            merged.append((0.0, 0.0))
        merged[-1] = merged[-1][0] + value, merged[-1][1] + mass
    if len(merged) > 1 and merged[-1][1] < _MIN_EXPECTED:
        value, mass = merged.pop()
        merged[-1] = merged[-1][0] + value, merged[-1][1] + mass
    pooled_values, pooled_expected = np.asarray(merged).T
    return pooled_values, np.maximum(pooled_expected, _TINY)
