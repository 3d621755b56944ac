"""Measured generation times, and one structural variant of the cost model fitted to them.

A calibration is a Gaussian over the logarithms of its free parameters, the ranges in which it was measured, and the
error that it leaves. Legend: `P` free parameters, `N` cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.config import require
from slipstream.simulator.cost import Array
from slipstream.simulator.cost.iteration import CostModel, Drafting
from slipstream.simulator.cost.lengths import lengths_with_mean
from slipstream.simulator.cost.parameters import NAMES, CostParameters, Prior, Regime, believed, names_of
from slipstream.simulator.cost.rollout import RolloutShape, Trace, slowest_engine
from slipstream.simulator.cost.settings import Setting
from slipstream.simulator.fit.acceptance_by_position import check_length
from slipstream.simulator.fit.solver import Problem, minimise, sample_posterior

_LONGEST_MEAN = 0.98  # of max_response_tokens: a mean must leave room for the longest
_WIDENING = 0.15  # standard deviation of the logarithm that each doubling beyond the measured range adds


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rollouts of one kind of responses: a workload, or one batch of a sweep.

    `mean_tokens` is where the mean response length is believed to be, `mean_log_sd` how surely: 0 means that it was
    counted, anything else makes it a free parameter of the calibration. `length_log_sd` is the spread of the responses.
    """

    name: str
    shape: RolloutShape
    mean_tokens: float
    mean_log_sd: float
    length_log_sd: float

    def trace(self, setting: Setting, mean_tokens: float) -> Trace:
        """The slowest engine's rollout if responses had `mean_tokens` tokens on average."""
        mean = min(max(mean_tokens, 1.0), _LONGEST_MEAN * setting.max_response_tokens)
        limit = float(setting.max_response_tokens)
        return slowest_engine(lengths_with_mean(mean=mean, log_sd=self.length_log_sd, max_tokens=limit), self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measured generation time; `log_sd` is the noise of its logarithm. k = 0 is autoregressive decoding.

    `clock` names the cell whose machine time this one was scaled to: it shares that cell's noise, and adds its own.
    """

    label: str
    group: Group
    k: int
    acceptance_length: float
    generation_s: float
    log_sd: float
    drafting: Drafting = Drafting.EAGLE3
    clock: str = ""

    def __post_init__(self) -> None:
        require(self.generation_s > 0, f"cell {self.label}.generation_s", "must be > 0", self.generation_s)
        require(self.log_sd > 0, f"cell {self.label}.log_sd", "must be > 0", self.log_sd)
        check_length(self.k, self.acceptance_length, f"cell {self.label}.acceptance_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Validity:
    """What was measured: nothing outside is more than a guess."""

    min_k: int  # of the speculative cells; 0 when there are none
    max_k: int
    max_batch: float  # a rollout's batch shrinks to its last sequence, so everything below was run

    def warnings(self, *, k: int, batch: float) -> tuple[str, ...]:
        """What lies outside, one sentence each."""
        found = []
        if k > 0 and not self.min_k <= k <= self.max_k:
            measured = f"only k = {self.min_k}" if self.min_k == self.max_k else f"k = {self.min_k} to {self.max_k}"
            found.append(f"k = {k} was not measured ({measured if self.max_k else 'no speculation'})")
        if batch > self.max_batch:
            found.append(f"a running batch of {batch:.0f} was not measured (1 to {self.max_batch:.0f})")
        return tuple(f"{sentence}: the band is wider" for sentence in found)

    def extra_log_sd(self, *, k: int, batch: float) -> float:
        """Standard deviation that extrapolation adds: in doublings of k + 1 and of the batch beyond the range."""
        drafts = max(1.0, (k + 1) / (self.max_k + 1), (self.min_k + 1) / (k + 1)) if k > 0 else 1.0
        return _WIDENING * float(np.hypot(np.log2(drafts), np.log2(max(1.0, batch / self.max_batch))))


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """One structure of the cost model on the layout that was measured.

    `free` are cost parameters, then names of the groups whose mean length is not known; a point of the fit holds the
    logarithms of both.
    """

    regime: Regime
    setting: Setting
    believed: CostParameters  # before the fit
    free: tuple[str, ...]

    def parameters(self, log_values: Array) -> CostParameters:
        """Cost parameters at `log_values` [P]."""
        costs = [name for name in self.free if name in NAMES]
        return replace(self.believed, **dict(zip(costs, np.exp(log_values[: len(costs)]).tolist(), strict=True)))

    def means(self, log_values: Array) -> dict[str, float]:
        """Mean response tokens of the groups in `free` at `log_values` [P]."""
        values = zip(self.free, np.exp(log_values).tolist(), strict=True)
        return {name: value for name, value in values if name not in NAMES}

    def predict_s(self, cells: Sequence[Cell], log_values: Array) -> Array:
        """Seconds [N] of `cells`, measured or not."""
        means = self.means(log_values)
        model = CostModel(setting=self.setting, parameters=self.parameters(log_values))
        alike: dict[tuple[Group, Drafting], list[int]] = {}
        for index, cell in enumerate(cells):
            alike.setdefault((cell.group, cell.drafting), []).append(index)
        found = np.empty(len(cells))
        for (group, drafting), indices in alike.items():
            spans_s = model.span_s(
                group.trace(self.setting, means.get(group.name, group.mean_tokens)),
                k=np.array([[cells[index].k] for index in indices]),
                tokens_per_iteration=np.array([[cells[index].acceptance_length] for index in indices]),
                drafting=drafting,
            )
            found[indices] = spans_s.sum(axis=1)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """One structural variant, fitted."""

    variant: Variant
    log_values: Array  # [P], the most probable ones
    samples: Array  # [draws, P]
    effective_parameters: float  # what the data decided, rather than the priors
    log_evidence: float
    cells: tuple[Cell, ...]
    fitted_s: Array  # [N]
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

    def model(self, setting: Setting) -> CostModel:
        """The most probable cost model, on the engines of `setting`."""
        return CostModel(setting=setting, parameters=self.variant.parameters(self.log_values))

    def sample(self, random: np.random.Generator) -> Array:
        """Logarithms of one draw of the free parameters."""
        return self.samples[random.integers(len(self.samples))]


def fit(setting: Setting, cells: Sequence[Cell], priors: Mapping[str, Prior], regime: Regime) -> Calibration:
    """The most probable parameters of one structural variant, and what is left open."""
    costs = names_of(regime, ngram=any(cell.drafting is Drafting.NGRAM for cell in cells))
    lengths = [group for group in dict.fromkeys(cell.group for cell in cells) if group.mean_log_sd > 0]
    free = (*costs, *(group.name for group in lengths))
    prior = np.log([priors[name].median for name in costs] + [group.mean_tokens for group in lengths])
    prior_sd = np.array([priors[name].log_sd for name in costs] + [group.mean_log_sd for group in lengths])
    variant = Variant(regime=regime, setting=setting, believed=believed(regime, priors), free=free)
    measured = np.log([cell.generation_s for cell in cells])
    noise = np.array([cell.log_sd for cell in cells])
    labels = [cell.label for cell in cells]
    clocks = np.array([labels.index(cell.clock) if cell.clock in labels else -1 for cell in cells])

    def residuals(log_values: Array) -> Array:
        errors = np.log(variant.predict_s(cells, log_values)) - measured
        return (errors - np.where(clocks < 0, 0.0, errors[clocks])) / noise

    ks = [cell.k for cell in cells if cell.k > 0] or [0]
    max_batch = float(max(cell.group.shape.per_engine for cell in cells))
    problem = Problem(residuals=residuals, prior=prior, prior_sd=prior_sd)
    found = minimise(problem)
    return Calibration(
        variant=variant,
        log_values=found.solution,
        samples=sample_posterior(problem, found),
        effective_parameters=float(np.sum(1.0 - np.diag(found.covariance) / prior_sd**2)),
        log_evidence=found.log_evidence,
        cells=tuple(cells),
        fitted_s=variant.predict_s(cells, found.solution),
        validity=Validity(min_k=min(ks), max_k=max(ks), max_batch=max_batch),
    )
