"""The structural variants together: weighed by the data, averaged for a prediction, sampled for a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.simulator.cost import Array
from slipstream.simulator.cost.parameters import CostParameters
from slipstream.simulator.fit.calibration import Calibration
from slipstream.simulator.fit.cells import Cell
from slipstream.statistics import Spread, spread

_BAND_DRAWS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One way the world may be, given the measurements. The errors are factors on generation times: the model's own."""

    parameters: CostParameters
    autoregressive_error: float
    speculative_error: float


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

    def bands_s(self, cells: Sequence[Cell], *, seed: int = 0) -> tuple[Spread, ...]:
        """The band of each of `cells`: members, covariance, model error, and what extrapolation adds."""
        random = np.random.default_rng(seed)
        sampled = []
        for index in random.choice(len(self.members), size=_BAND_DRAWS, p=self.weights):
            member = self.members[index]
            groups, validity = member.variant.groups, member.validity
            extra = [validity.extra_log_sd(k=cell.k, batch=groups[cell.group].shape.per_engine) for cell in cells]
            error = np.hypot(member.model_log_sd, extra) * random.standard_normal(len(cells))
            sampled.append(member.variant.predict_s(cells, member.sample(random)) * np.exp(error))
        return tuple(spread(column) for column in np.stack(sampled, axis=1).tolist())

    def draws(self, *, k: int, batch: float, count: int, seed: int) -> tuple[Draw, ...]:
        """Sample members by their weight and parameters by their covariance.

        Args:
            k: draft length to be projected; outside what was measured the error grows.
            batch: largest running batch to be projected, likewise.
        """
        random = np.random.default_rng(seed)
        chosen = random.choice(len(self.members), size=count, p=self.weights)
        return tuple(_draw(self.members[index], random, k=k, batch=batch) for index in chosen)


def _draw(member: Calibration, random: np.random.Generator, *, k: int, batch: float) -> Draw:
    log_values = member.sample(random)
    extra = member.validity.extra_log_sd(k=k, batch=batch)
    first, second = random.standard_normal(2)
    return Draw(
        parameters=member.variant.parameters(log_values),
        autoregressive_error=float(np.exp(member.model_log_sd * first)),
        speculative_error=float(np.exp(np.hypot(member.model_log_sd, extra) * second)),
    )
