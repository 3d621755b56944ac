"""Measured generation times in the form that calibration reads, and the model's value for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require
from slipstream.sim.iteration import Drafting, Engine, generation_s
from slipstream.sim.lengths import long_tailed_with_mean
from slipstream.sim.parameters import CostParameters, Regime
from slipstream.sim.rollout import RolloutShape, Trace, slowest_engine

Array = NDArray[np.float64]
_LONGEST_MEAN = 0.98  # of max_response_tokens: a mean must leave room for the longest


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rollouts of one kind of responses: a workload, or one batch of a sweep.

    `mean_tokens` is where the mean response length is believed to be, `mean_log_sd` how surely: 0 means that it was
    counted, anything else makes it a free parameter of the calibration.
    """

    name: str
    shape: RolloutShape
    mean_tokens: float
    mean_log_sd: float
    length_log_sd: float
    max_tokens: float

    def trace(self, mean_tokens: float) -> Trace:
        """The slowest engine's rollout if responses had `mean_tokens` tokens on average."""
        mean = min(max(mean_tokens, 1.0), _LONGEST_MEAN * self.max_tokens)
        lengths = long_tailed_with_mean(mean=mean, log_sd=self.length_log_sd, max_tokens=self.max_tokens)
        return slowest_engine(lengths, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measured generation time; `log_sd` is the noise of its logarithm."""

    label: str
    group: str
    k: int
    drafting: Drafting
    acceptance_length: float
    generation_s: float
    log_sd: float

    def __post_init__(self) -> None:
        require(self.generation_s > 0, f"cell {self.label}.generation_s", "must be > 0", self.generation_s)
        require(self.log_sd > 0, f"cell {self.label}.log_sd", "must be > 0", self.log_sd)
        require(
            1.0 <= self.acceptance_length <= self.k + 1,
            f"cell {self.label}.acceptance_length",
            f"must lie in [1, k + 1 = {self.k + 1}]",
            self.acceptance_length,
        )


def predicted_s(
    cells: Sequence[Cell],
    groups: Mapping[str, Group],
    *,
    means: Mapping[str, float],
    engine: Engine,
    parameters: CostParameters,
    regime: Regime,
) -> Array:
    """Seconds that the model gives each cell, when the groups' responses have `means` tokens on average."""
    traces = {name: groups[name].trace(means[name]) for name in {cell.group for cell in cells}}
    return np.array(
        [
            generation_s(
                traces[cell.group],
                engine,
                parameters,
                k=cell.k,
                tokens_per_iteration=cell.acceptance_length,
                regime=regime,
                drafting=cell.drafting,
            )
            for cell in cells
        ]
    )
