"""The structural variants together: weighed by the data, averaged for a prediction, sampled for a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require
from slipstream.sim.calibration import Calibration
from slipstream.sim.cells import Cell
from slipstream.sim.iteration import Engine
from slipstream.sim.parameters import CostParameters, Regime

Array = NDArray[np.float64]

NUM_DRAWS = 96
_BAND_DRAWS = 400
_LEVELS = (10, 50, 90)


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """10th percentile, median and 90th percentile."""

    p10: float
    median: float
    p90: float

    def holds(self, value: float) -> bool:
        """Whether `value` lies inside."""
        return self.p10 <= value <= self.p90


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One way the world may be, given the measurements."""

    parameters: CostParameters
    regime: Regime
    mean_tokens: dict[str, float]  # of each calibrated group
    autoregressive_error: float  # factors on generation times: the model's own error
    speculative_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ensemble:
    """Calibrations of the same cells under different structures, the most probable first."""

    members: tuple[Calibration, ...]

    def __post_init__(self) -> None:
        require(len(self.members) > 0, "ensemble", "must hold at least one calibration", 0)

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

    @property
    def fitted_s(self) -> Array:
        """Seconds of the calibrated cells, averaged over the members as `predict_s` does."""
        return np.exp(self.weights @ np.log([member.fitted_s for member in self.members]))

    def predict_s(self, engine: Engine, cells: Sequence[Cell]) -> Array:
        """Seconds of `cells` of the calibrated groups: the members' weighted geometric mean."""
        return np.exp(self.weights @ np.log([member.predict_s(engine, cells) for member in self.members]))

    def bands_s(self, engine: Engine, cells: Sequence[Cell], *, seed: int = 0) -> tuple[Band, ...]:
        """The band of each of `cells`: members, covariance, model error, and what extrapolation adds."""
        random = np.random.default_rng(seed)
        sampled = []
        for index in random.choice(len(self.members), size=_BAND_DRAWS, p=self.weights):
            member = self.members[index]
            batches = [float(member.groups[cell.group].shape.per_engine) for cell in cells]
            extra = [
                member.validity.extra_log_sd(k=cell.k, batch=batch) for cell, batch in zip(cells, batches, strict=True)
            ]
            error = np.hypot(member.model_log_sd, extra) * random.standard_normal(len(cells))
            sampled.append(member.predict_s(engine, cells, member.sample(random)) * np.exp(error))
        return tuple(band(column) for column in np.stack(sampled, axis=1))

    def draws(self, *, k: int, batch: float, count: int = NUM_DRAWS, seed: int = 0) -> tuple[Draw, ...]:
        """Sample members by their weight and parameters by their covariance.

        Args:
            k: draft length to be projected; outside what was measured the error grows.
            batch: largest running batch to be projected, likewise.
        """
        random = np.random.default_rng(seed)
        chosen = random.choice(len(self.members), size=count, p=self.weights)
        return tuple(_draw(self.members[index], random, k=k, batch=batch) for index in chosen)

    def warnings(self, *, k: int, batch: float) -> tuple[str, ...]:
        """What of a projection lies outside what was measured, one sentence each."""
        return self.best.validity.warnings(k=k, batch=batch)


def band(values: Sequence[float] | Array) -> Band:
    """The band of sampled `values`."""
    p10, median, p90 = np.percentile(np.asarray(values), _LEVELS)
    return Band(p10=float(p10), median=float(median), p90=float(p90))


def _draw(member: Calibration, random: np.random.Generator, *, k: int, batch: float) -> Draw:
    log_values = member.sample(random)
    extra = member.validity.extra_log_sd(k=k, batch=batch)
    first, second = random.standard_normal(2)
    return Draw(
        parameters=member.parameters(log_values),
        regime=member.regime,
        mean_tokens=member.means(log_values),
        autoregressive_error=float(np.exp(member.model_log_sd * first)),
        speculative_error=float(np.exp(np.hypot(member.model_log_sd, extra) * second)),
    )
