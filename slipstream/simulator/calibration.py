"""Fits of the cost model to measured generation times, in several structural variants, and predictions with bands.

A calibration is one fitted variant: the posterior of the logarithms of its free parameters, the measured ranges, and
the residual error. An ensemble weighs the variants by their evidence. Acceptance rates are conditional: a_i is the
probability that draft token i (from 0) is accepted if all earlier tokens are. AL(k) = 1 + a_0 + a_0 a_1 + ... has k
terms after the bonus token. A constant rate would fit one k and miss the others, so rates fall with the position, on
the logit scale. A fit is least squares with Gaussian priors, by MINPACK's Levenberg-Marquardt.

Legend: `P` free parameters, `N` cells, `R` residuals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares
from scipy.special import softmax

from slipstream.catalog import target_of
from slipstream.config import require
from slipstream.simulator import Array
from slipstream.simulator.iteration import CostModel, Drafting
from slipstream.simulator.rollout import RolloutShape, Trace, lengths_with_mean, slowest_engine
from slipstream.simulator.settings import NAMES, OF_REGIME, CostParameters, Prior, Regime, Setting, load_priors
from slipstream.statistics import Spread, spread

# Prior of a profile: 80 % for the first token, a little less for each later one.
_PRIOR = np.array([1.4, 0.1])
_PRIOR_SD = np.array([2.0, 0.3])
_LENGTH_SD = 0.02  # acceptance lengths are published with two decimals
_LONGEST_MEAN = 0.98  # largest mean, as a fraction of max_response_tokens: the longest responses exceed the mean
_WIDENING = 0.15  # log standard deviation that each doubling beyond the measured range adds
_BAND_DRAWS = 400
_TOLERANCE = 1e-12  # the smallest that converges: in a flat direction last digits would differ between processors
_PROPOSALS = 256
_DRAWS = 200
# The CPU engine captures no graphs, so it has no captured sizes.
_REGIMES = {"cpu": (Regime.SMOOTH, Regime.TILE), "gpu": tuple(Regime)}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceProfile:
    """Conditional acceptance rates a_i = sigmoid(level - fall * i) for positions i from 0."""

    level: float
    fall: float

    def length(self, k: int) -> float:
        """Compute the mean acceptance length with `k` draft tokens, bonus token included; 1 for k = 0."""
        rates = 1.0 / (1.0 + np.exp(-(self.level - self.fall * np.arange(k))))
        return 1.0 + float(np.sum(np.cumprod(rates)))


def check_length(k: int, length: float, field: str = "acceptance_length") -> None:
    """Check that `k` draft tokens can have an acceptance length."""
    require(1.0 <= length <= k + 1, field, f"must lie in [1, k + 1 = {k + 1}]", length)


def fit_profile(length_by_k: Mapping[int, float]) -> AcceptanceProfile:
    """Fit a profile to acceptance lengths that were measured with different k >= 1."""

    def profile(x: Array) -> AcceptanceProfile:
        return AcceptanceProfile(level=float(x[0]), fall=float(x[1]))

    def residuals(x: Array) -> Array:
        return np.array([(profile(x).length(k) - length) / _LENGTH_SD for k, length in length_by_k.items()])

    return profile(fit_posterior(residuals, _PRIOR, _PRIOR_SD).mode)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rollouts with one distribution of response lengths: a workload, or one batch size of a sweep.

    The mean response length is a free parameter with a log-normal prior of median `mean_tokens`, unless a `mean_log_sd`
    of 0 says that it was counted. `length_log_sd` is the spread of the responses.
    """

    name: str
    shape: RolloutShape
    mean_tokens: float
    mean_log_sd: float
    length_log_sd: float

    def trace(self, setting: Setting, mean_tokens: float) -> Trace:
        """Schedule the slowest engine for responses of `mean_tokens` tokens on average."""
        mean = min(max(mean_tokens, 1.0), _LONGEST_MEAN * setting.max_response_tokens)
        limit = float(setting.max_response_tokens)
        return slowest_engine(lengths_with_mean(mean=mean, log_sd=self.length_log_sd, max_tokens=limit), self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Measured generation time with the noise `log_sd` of its logarithm; k = 0 is autoregressive decoding."""

    label: str
    group: Group
    k: int
    acceptance_length: float
    generation_s: float
    log_sd: float
    drafting: Drafting = Drafting.EAGLE3
    clock: str = ""  # label of the cell by whose seconds this one is scaled, and whose noise it shares

    def __post_init__(self) -> None:
        require(self.generation_s > 0, f"cell {self.label}.generation_s", "must be > 0", self.generation_s)
        check_length(self.k, self.acceptance_length, f"cell {self.label}.acceptance_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Validity:
    """Measured ranges; predictions outside the ranges have wider bands."""

    min_k: int  # smallest k of the speculative cells; 0 without such cells
    max_k: int
    max_batch: float  # largest measured batch; a rollout's batch shrinks to 1, so smaller batches were measured too

    def warnings(self, *, k: int, batch: float) -> tuple[str, ...]:
        """Return a sentence for each figure outside the measured ranges."""
        found = []
        if k > 0 and not self.min_k <= k <= self.max_k:
            measured = f"only k = {self.min_k}" if self.min_k == self.max_k else f"k = {self.min_k} to {self.max_k}"
            found.append(f"k = {k} was not measured ({measured if self.max_k else 'no speculation'})")
        if batch > self.max_batch:
            found.append(f"a running batch of {batch:.0f} was not measured (1 to {self.max_batch:.0f})")
        return tuple(f"{sentence}: the band is wider" for sentence in found)

    def extra_log_sd(self, *, k: int, batch: float) -> float:
        """Compute the log sd of extrapolation, from doublings of k + 1 and of the batch beyond the ranges."""
        drafts = max(1.0, (k + 1) / (self.max_k + 1), (self.min_k + 1) / (k + 1)) if k > 0 else 1.0
        return _WIDENING * float(np.hypot(np.log2(drafts), np.log2(max(1.0, batch / self.max_batch))))


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """Structural variant of the cost model on the measured layout; a point of its fit holds logarithms of `free`."""

    regime: Regime
    setting: Setting
    believed: CostParameters  # before the fit
    free: tuple[str, ...]  # cost parameters, then names of the groups with an unknown mean length

    def values(self, log_values: Array) -> dict[str, float]:
        """Return the values of `free` at a point `log_values` [P]."""
        return dict(zip(self.free, np.exp(log_values).tolist(), strict=True))

    def parameters(self, log_values: Array) -> CostParameters:
        """Return the cost parameters at a point `log_values` [P]."""
        costs = {name: value for name, value in self.values(log_values).items() if name in NAMES}
        return replace(self.believed, **costs)

    def predict_s(self, cells: Sequence[Cell], log_values: Array) -> Array:
        """Predict the seconds [N] of cells at a point `log_values` [P]."""
        values = self.values(log_values)
        model = CostModel(setting=self.setting, parameters=self.parameters(log_values))
        alike: dict[tuple[Group, Drafting], list[int]] = {}
        for index, cell in enumerate(cells):
            alike.setdefault((cell.group, cell.drafting), []).append(index)
        found = np.empty(len(cells))
        for (group, drafting), indices in alike.items():
            spans_s = model.span_s(
                group.trace(self.setting, values.get(group.name, group.mean_tokens)),
                k=np.array([[cells[index].k] for index in indices]),
                tokens_per_iteration=np.array([[cells[index].acceptance_length] for index in indices]),
                drafting=drafting,
            )
            found[indices] = spans_s.sum(axis=1)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Fitted structural variant."""

    variant: Variant
    posterior: Posterior  # over logarithms of the variant's free parameters
    cells: tuple[Cell, ...]
    fitted_s: Array  # [N]
    validity: Validity

    @property
    def relative_errors(self) -> Array:
        """Relative error of each cell: fitted / measured - 1."""
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
        """Log standard deviation of the model's own error: residuals of the fit by remaining degrees of freedom."""
        free = max(1.0, len(self.cells) - self.posterior.effective_parameters)
        residuals = np.log1p(self.relative_errors)
        return float(np.sqrt(residuals @ residuals / free))

    def model(self, setting: Setting) -> CostModel:
        """Return the most probable cost model for the engines of `setting`."""
        return CostModel(setting=setting, parameters=self.variant.parameters(self.posterior.mode))

    def sample(self, random: np.random.Generator) -> Array:
        """Sample logarithms of the free parameters from the posterior."""
        return self.posterior.samples[random.integers(len(self.posterior.samples))]


def fit(setting: Setting, cells: Sequence[Cell], priors: Mapping[str, Prior], regime: Regime) -> Calibration:
    """Fit one structural variant to measured cells."""
    used = [name for name in NAMES if OF_REGIME.get(name, regime) is regime]
    has_ngram = any(cell.drafting is Drafting.NGRAM for cell in cells)
    believed = CostParameters(**{name: priors[name].median if name in used else 0.0 for name in NAMES})
    costs = [name for name in used if has_ngram or name != "ngram_s_per_token"]
    lengths = [group for group in dict.fromkeys(cell.group for cell in cells) if group.mean_log_sd > 0]
    free = (*costs, *(group.name for group in lengths))
    prior = np.log([priors[name].median for name in costs] + [group.mean_tokens for group in lengths])
    prior_sd = np.array([priors[name].log_sd for name in costs] + [group.mean_log_sd for group in lengths])
    variant = Variant(regime=regime, setting=setting, believed=believed, free=free)
    measured = np.log([cell.generation_s for cell in cells])
    noise = np.array([cell.log_sd for cell in cells])
    labels = [cell.label for cell in cells]
    clocks = np.array([labels.index(cell.clock) if cell.clock in labels else -1 for cell in cells])

    def residuals(log_values: Array) -> Array:
        errors = np.log(variant.predict_s(cells, log_values)) - measured
        return (errors - np.where(clocks < 0, 0.0, errors[clocks])) / noise

    ks = [cell.k for cell in cells if cell.k > 0] or [0]
    max_batch = float(max(cell.group.shape.per_engine for cell in cells))
    posterior = fit_posterior(residuals, prior, prior_sd)
    return Calibration(
        variant=variant,
        posterior=posterior,
        cells=tuple(cells),
        fitted_s=variant.predict_s(cells, posterior.mode),
        validity=Validity(min_k=min(ks), max_k=max(ks), max_batch=max_batch),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Sample of parameters and model error; the errors are factors on generation times."""

    parameters: CostParameters
    autoregressive_error: float
    speculative_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantRecord:
    """Record of one structural variant of a calibration; errors are relative."""

    regime: str
    weight: float
    num_parameters: int
    effective_parameters: float
    rms_error: float
    max_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCell:
    """Measured generation time beside the ensemble's."""

    label: str
    measured_s: float
    simulated_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRecord:
    """Record of a calibration: its variants, and measured beside simulated times."""

    source: str
    variants: tuple[VariantRecord, ...]
    cells: tuple[FittedCell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ensemble:
    """Calibrations of the same cells in different structural variants, the most probable first."""

    members: tuple[Calibration, ...]

    @property
    def weights(self) -> Array:
        """Posterior probability of each member under a uniform prior: the softmax of the log evidence."""
        return softmax([member.posterior.log_evidence for member in self.members])

    @property
    def best(self) -> Calibration:
        """The most probable member."""
        return self.members[0]

    def predict_s(self, cells: Sequence[Cell]) -> Array:
        """Predict the seconds of cells of the calibrated groups: the members' weighted geometric mean."""
        predicted = [member.variant.predict_s(cells, member.posterior.mode) for member in self.members]
        return np.exp(self.weights @ np.log(predicted))

    def bands_s(self, cells: Sequence[Cell]) -> tuple[Spread, ...]:
        """Compute the band of each cell from members, posterior samples, model error and extrapolation."""
        random = np.random.default_rng(0)
        sampled = []
        for index in random.choice(len(self.members), size=_BAND_DRAWS, p=self.weights):
            member = self.members[index]
            extra = [member.validity.extra_log_sd(k=cell.k, batch=cell.group.shape.per_engine) for cell in cells]
            error = np.hypot(member.model_log_sd, extra) * random.standard_normal(len(cells))
            sampled.append(member.variant.predict_s(cells, member.sample(random)) * np.exp(error))
        return tuple(spread(column) for column in np.stack(sampled, axis=1).tolist())

    def draws(self, *, k: int, batch: float, count: int, seed: int) -> tuple[Draw, ...]:
        """Sample members by weight, and parameters and errors of each; errors grow outside the measured ranges."""
        random, found = np.random.default_rng(seed), []
        for index in random.choice(len(self.members), size=count, p=self.weights):
            member = self.members[index]
            parameters = member.variant.parameters(member.sample(random))
            model, extra = member.model_log_sd, member.validity.extra_log_sd(k=k, batch=batch)
            base, spec = np.exp(np.array([model, np.hypot(model, extra)]) * random.standard_normal(2)).tolist()
            found.append(Draw(parameters=parameters, autoregressive_error=base, speculative_error=spec))
        return tuple(found)

    def record(self, source: str) -> CalibrationRecord:
        """Build the record of this ensemble; `source` names the origin of the cells."""
        cells = self.best.cells
        return CalibrationRecord(
            source=source,
            variants=tuple(
                VariantRecord(
                    regime=member.variant.regime.value,
                    weight=weight,
                    num_parameters=len(member.variant.free),
                    effective_parameters=member.posterior.effective_parameters,
                    rms_error=member.rms_error,
                    max_error=member.max_error,
                )
                for member, weight in zip(self.members, self.weights.tolist(), strict=True)
            ),
            cells=tuple(
                FittedCell(label=cell.label, measured_s=cell.generation_s, simulated_s=seconds)
                for cell, seconds in zip(cells, self.predict_s(cells).tolist(), strict=True)
            ),
        )


def calibrate(setting: Setting, cells: Sequence[Cell]) -> Ensemble:
    """Fit every structural variant that is possible on the machine of `setting`."""
    target = target_of(setting.hardware)
    priors, regimes = load_priors(target), _REGIMES[target]
    fitted = [fit(setting, cells, priors, regime) for regime in regimes]
    # Variants with equal evidence keep the order of `regimes`, independent of numpy's rounding.
    return Ensemble(members=tuple(sorted(fitted, key=lambda member: -round(member.posterior.log_evidence, 6))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Posterior:
    """Posterior of a fit: its mode, its covariance, and samples."""

    mode: Array  # [P]
    effective_parameters: float  # number of parameters that the data determine, rather than the prior
    log_evidence: float  # log evidence of the structure, up to a constant that all structures share
    samples: Array  # [200, P]
    covariance: Array  # [P, P], the Gauss-Newton (Laplace) approximation


def fit_posterior(residuals: Callable[[Array], Array], prior: Array, prior_sd: Array) -> Posterior:
    """Minimise |residuals|^2 + |(x - prior) / prior_sd|^2 from the prior on, and sample around the minimum.

    Where a roofline bends, half the samples of the Gaussian are improbable, so the samples are resampled by their
    probability. A weight is at most sqrt(number of samples) times the mean weight: no sample replaces all others.

    Args:
        residuals: from parameters [P] to residuals [R], in units of their own standard deviation.
    Source:
        Evidence by Laplace's method: MacKay, Neural Computation 4 (1992) 415, equation 2.10. Resampling: Rubin,
        Bayesian Statistics 3 (1988) 395; Ionides, J. Comput. Graph. Stat. 17 (2008) 295.
    """

    def stacked(x: Array) -> Array:
        return np.concatenate([residuals(x), (x - prior) / prior_sd])

    found = least_squares(
        stacked,
        prior,
        method="lm",
        x_scale=prior_sd,
        jac="3-point",  # a one-sided difference at a roofline's bend depends on the last bit of the figures
        ftol=_TOLERANCE,
        xtol=_TOLERANCE,
        gtol=_TOLERANCE,
    )
    if not found.success:
        logger.warning("the fit stopped before its minimum: %s", found.message)
    # The rows of the priors make the product positive definite.
    covariance = np.asarray(np.linalg.inv(found.jac.T @ found.jac), dtype=np.float64)
    sign, log_volume = np.linalg.slogdet(covariance)
    assert sign > 0
    random = np.random.default_rng(0)
    standard = random.standard_normal((_PROPOSALS, len(prior)))
    proposed = found.x + standard @ np.linalg.cholesky(covariance).T
    costs = np.array([np.sum(stacked(x) ** 2) for x in proposed])
    log_weights = 0.5 * (np.sum(standard**2, axis=1) - costs)
    weights = np.exp(log_weights - log_weights.max())
    weights = np.minimum(weights, weights.mean() * np.sqrt(_PROPOSALS))
    return Posterior(
        mode=found.x,
        covariance=covariance,
        effective_parameters=float(np.sum(1.0 - np.diag(covariance) / prior_sd**2)),
        log_evidence=float(0.5 * (log_volume - 2.0 * float(np.sum(np.log(prior_sd)))) - found.cost),
        samples=proposed[random.choice(_PROPOSALS, size=_DRAWS, p=weights / weights.sum())],
    )
