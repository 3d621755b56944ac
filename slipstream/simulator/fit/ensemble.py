"""The structural variants together: weighed by the data, averaged for a prediction, sampled for a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.config import require
from slipstream.simulator.cost import Array
from slipstream.simulator.cost.hardware import target_of
from slipstream.simulator.cost.parameters import CostParameters, Regime, load_priors
from slipstream.simulator.cost.settings import Setting
from slipstream.simulator.fit.calibration import Calibration, Cell, fit
from slipstream.statistics import Spread, spread

_BAND_DRAWS = 400
# The CPU engine captures no graphs, so nothing can leave the captured sizes.
_REGIMES = {"cpu": (Regime.SMOOTH, Regime.TILE), "gpu": tuple(Regime)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One way the world may be, given the measurements. The errors are factors on generation times: the model's own."""

    parameters: CostParameters
    autoregressive_error: float
    speculative_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantRecord:
    """One structural variant of a calibration. Errors are relative."""

    regime: str
    weight: float
    num_parameters: int
    effective_parameters: float
    rms_error: float
    max_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCell:
    """A measured generation time and the ensemble's."""

    label: str
    measured_s: float
    simulated_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRecord:
    """How well one set of measurements was fitted."""

    source: str
    variants: tuple[VariantRecord, ...]
    cells: tuple[FittedCell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ensemble:
    """Calibrations of the same cells under different structures, the most probable first."""

    members: tuple[Calibration, ...]

    @property
    def weights(self) -> Array:
        """Probability of each member given the data, all alike before: a softmax of the log evidence."""
        evidence = np.array([member.log_evidence for member in self.members])
        odds = np.exp(evidence - evidence.max())
        return odds / odds.sum()

    @property
    def best(self) -> Calibration:
        """The most probable member."""
        return self.members[0]

    def predict_s(self, cells: Sequence[Cell]) -> Array:
        """Seconds of `cells` of the calibrated groups: the members' weighted geometric mean."""
        predicted = [member.variant.predict_s(cells, member.log_values) for member in self.members]
        return np.exp(self.weights @ np.log(predicted))

    def bands_s(self, cells: Sequence[Cell]) -> tuple[Spread, ...]:
        """The band of each of `cells`: members, covariance, model error, and what extrapolation adds."""
        random = np.random.default_rng(0)
        sampled = []
        for index in random.choice(len(self.members), size=_BAND_DRAWS, p=self.weights):
            member = self.members[index]
            extra = [member.validity.extra_log_sd(k=cell.k, batch=cell.group.shape.per_engine) for cell in cells]
            error = np.hypot(member.model_log_sd, extra) * random.standard_normal(len(cells))
            sampled.append(member.variant.predict_s(cells, member.sample(random)) * np.exp(error))
        return tuple(spread(column) for column in np.stack(sampled, axis=1).tolist())

    def draws(self, *, k: int, batch: float, count: int, seed: int) -> tuple[Draw, ...]:
        """Sample members by their weight and parameters by their covariance.

        Args:
            k: draft length to be projected; outside what was measured the error grows.
            batch: largest running batch to be projected, likewise.
        """
        random, found = np.random.default_rng(seed), []
        for index in random.choice(len(self.members), size=count, p=self.weights):
            member = self.members[index]
            parameters = member.variant.parameters(member.sample(random))
            model, extra = member.model_log_sd, member.validity.extra_log_sd(k=k, batch=batch)
            base, spec = np.exp(np.array([model, np.hypot(model, extra)]) * random.standard_normal(2)).tolist()
            found.append(Draw(parameters=parameters, autoregressive_error=base, speculative_error=spec))
        return tuple(found)

    def record(self, source: str) -> CalibrationRecord:
        """Variants and cells, as plain figures; `source` says where the cells are from."""
        cells = self.best.cells
        return CalibrationRecord(
            source=source,
            variants=tuple(
                VariantRecord(
                    regime=member.variant.regime.value,
                    weight=weight,
                    num_parameters=len(member.variant.free),
                    effective_parameters=member.effective_parameters,
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
    """Fit every structural variant that the machine of `setting` can have.

    Raises:
        ConfigError: there are no cells.
    """
    require(len(cells) > 0, "cells", "must hold at least one measured time", 0)
    target = target_of(setting.hardware)
    priors, regimes = load_priors(target), _REGIMES[target]
    fitted = [fit(setting, cells, priors, regime) for regime in regimes]
    # Variants that the data cannot tell apart stay in the order of `regimes`, whatever the rounding of numpy.
    return Ensemble(members=tuple(sorted(fitted, key=lambda member: -round(member.log_evidence, 6))))
