"""Fit the cost model to measured generation times, once for each structural variant, and weigh the variants.

A calibration is a Gaussian over the logarithms of its free parameters, the ranges in which it was measured, and the
error that it leaves. Legend: `P` free parameters, `N` cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require
from slipstream.sim.cells import Cell, Group, predicted_s
from slipstream.sim.iteration import Drafting, Engine
from slipstream.sim.parameters import NAMES, CostParameters, Prior, Regime, cost_parameters, names_of
from slipstream.sim.solver import Problem, minimise, sample_posterior

Array = NDArray[np.float64]

_MEAN_PREFIX = "mean_tokens of "
_NUM_SAMPLES = 200
_WIDENING = 0.15  # standard deviation of the logarithm that each doubling beyond the measured range adds


@dataclass(frozen=True, kw_only=True, slots=True)
class Validity:
    """What was measured: nothing outside is more than a guess."""

    min_k: int  # of the speculative cells; 0 when there are none
    max_k: int
    min_batch: float
    max_batch: float

    def warnings(self, *, k: int, batch: float) -> tuple[str, ...]:
        """What lies outside, one sentence each."""
        found = []
        if k > 0 and not self.min_k <= k <= self.max_k:
            measured = f"only k = {self.min_k}" if self.min_k == self.max_k else f"k = {self.min_k} to {self.max_k}"
            found.append(
                f"k = {k} was not measured ({measured if self.max_k else 'no speculation'}): the band is wider"
            )
        if not self.min_batch <= batch <= self.max_batch:
            found.append(
                f"a running batch of {batch:.0f} was not measured "
                f"({self.min_batch:.0f} to {self.max_batch:.0f}): the band is wider"
            )
        return tuple(found)

    def extra_log_sd(self, *, k: int, batch: float) -> float:
        """Standard deviation that extrapolation adds: in doublings of k + 1 and of the batch beyond the range."""
        drafts = _doublings(k + 1, self.min_k + 1, self.max_k + 1) if k > 0 else 0.0
        return _WIDENING * float(np.hypot(drafts, _doublings(batch, self.min_batch, self.max_batch)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """One structural variant, fitted. `names` are cost parameters, then the free mean lengths of groups."""

    regime: Regime
    names: tuple[str, ...]
    log_values: Array  # [P]
    covariance: Array  # [P, P]
    samples: Array  # [draws, P]
    effective_parameters: float  # what the data decided, rather than the priors
    log_evidence: float
    cells: tuple[Cell, ...]
    fitted_s: Array  # [N]
    groups: Mapping[str, Group]
    priors: Mapping[str, Prior]
    validity: Validity

    @property
    def relative_errors(self) -> Array:
        """Fitted over measured, less 1, of each cell."""
        return self.fitted_s / np.array([cell.generation_s for cell in self.cells]) - 1.0

    @property
    def rms_error(self) -> float:
        """Root mean square of the relative errors."""
        return float(np.sqrt(np.mean(self.relative_errors**2)))

    @property
    def max_error(self) -> float:
        """Largest absolute relative error."""
        return float(np.abs(self.relative_errors).max())

    @property
    def model_log_sd(self) -> float:
        """Error of a prediction apart from its parameters': what the fit left, for the degrees that were left."""
        free = max(1.0, len(self.cells) - self.effective_parameters)
        residuals = np.log1p(self.relative_errors)
        return float(np.sqrt(residuals @ residuals / free))

    def parameters(self, log_values: Array | None = None) -> CostParameters:
        """Cost parameters at `log_values` (default: the most probable ones)."""
        values = self.log_values if log_values is None else log_values
        count = sum(name in NAMES for name in self.names)
        return cost_parameters(self.names[:count], values[:count], regime=self.regime, priors=self.priors)

    def sample(self, random: np.random.Generator) -> Array:
        """Logarithms of one draw of the free parameters."""
        return self.samples[random.integers(len(self.samples))]

    def means(self, log_values: Array | None = None) -> dict[str, float]:
        """Mean response tokens of each group."""
        values = self.log_values if log_values is None else log_values
        return _means(self.names, values, self.groups)

    def predict_s(self, engine: Engine, cells: Sequence[Cell], log_values: Array | None = None) -> Array:
        """Seconds of `cells` of the calibrated groups, measured or not."""
        return predicted_s(
            cells,
            self.groups,
            means=self.means(log_values),
            engine=engine,
            parameters=self.parameters(log_values),
            regime=self.regime,
        )


def calibrate(
    engine: Engine,
    cells: Sequence[Cell],
    groups: Sequence[Group],
    priors: Mapping[str, Prior],
    regimes: Sequence[Regime] = tuple(Regime),
) -> tuple[Calibration, ...]:
    """One calibration a regime, the most probable first.

    Raises:
        ConfigError: there are no cells, or one belongs to no group.
    """
    require(len(cells) > 0, "cells", "must hold at least one measured time", 0)
    by_name = {group.name: group for group in groups}
    for cell in cells:
        require(cell.group in by_name, f"cell {cell.label}.group", "must be a known group", cell.group)
    fitted = [_fit(engine, tuple(cells), by_name, priors, regime) for regime in regimes]
    return tuple(sorted(fitted, key=lambda calibration: -calibration.log_evidence))


def _fit(
    engine: Engine, cells: tuple[Cell, ...], groups: Mapping[str, Group], priors: Mapping[str, Prior], regime: Regime
) -> Calibration:
    names, prior, prior_sd = _beliefs(cells, groups, priors, regime)
    count = sum(name in NAMES for name in names)
    measured = np.log([cell.generation_s for cell in cells])
    noise = np.array([cell.log_sd for cell in cells])

    def seconds(log_values: Array) -> Array:
        return predicted_s(
            cells,
            groups,
            means=_means(names, log_values, groups),
            engine=engine,
            parameters=cost_parameters(names[:count], log_values[:count], regime=regime, priors=priors),
            regime=regime,
        )

    problem = Problem(residuals=lambda x: (np.log(seconds(x)) - measured) / noise, prior=prior, prior_sd=prior_sd)
    found = minimise(problem)
    return Calibration(
        regime=regime,
        names=names,
        log_values=found.solution,
        covariance=found.covariance,
        samples=sample_posterior(problem, found, count=_NUM_SAMPLES),
        effective_parameters=float(np.sum(1.0 - np.diag(found.covariance) / prior_sd**2)),
        log_evidence=found.log_evidence,
        cells=cells,
        fitted_s=seconds(found.solution),
        groups=groups,
        priors=priors,
        validity=_validity(cells, groups),
    )


def _beliefs(
    cells: Sequence[Cell], groups: Mapping[str, Group], priors: Mapping[str, Prior], regime: Regime
) -> tuple[tuple[str, ...], Array, Array]:
    ngram = any(cell.drafting is Drafting.NGRAM for cell in cells)
    costs = names_of(regime, ngram=ngram)
    used = {cell.group for cell in cells}
    free = [group for group in groups.values() if group.mean_log_sd > 0 and group.name in used]
    medians = [priors[name].median for name in costs] + [group.mean_tokens for group in free]
    sds = [priors[name].log_sd for name in costs] + [group.mean_log_sd for group in free]
    names = (*costs, *(_MEAN_PREFIX + group.name for group in free))
    return names, np.log(medians), np.array(sds)


def _means(names: Sequence[str], log_values: Array, groups: Mapping[str, Group]) -> dict[str, float]:
    free = dict(zip(names, np.exp(log_values).tolist(), strict=True))
    return {name: free.get(_MEAN_PREFIX + name, group.mean_tokens) for name, group in groups.items()}


def _validity(cells: Sequence[Cell], groups: Mapping[str, Group]) -> Validity:
    ks = [cell.k for cell in cells if cell.k > 0] or [0]
    batches = [float(min(groups[cell.group].shape.per_engine, groups[cell.group].shape.max_running)) for cell in cells]
    # A rollout's batch shrinks to its last sequence, so everything below the largest batch was run.
    return Validity(min_k=min(ks), max_k=max(ks), min_batch=1.0, max_batch=max(batches))


def _doublings(value: float, low: float, high: float) -> float:
    return float(np.log2(max(1.0, value / high, low / value)))
