"""Measured generation times in the form that calibration reads."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import require
from slipstream.simulator.cost.iteration import Drafting
from slipstream.simulator.cost.lengths import lengths_with_mean
from slipstream.simulator.cost.rollout import RolloutShape, Trace, slowest_engine
from slipstream.simulator.cost.settings import Setting
from slipstream.simulator.fit.acceptance import check_length

_LONGEST_MEAN = 0.98  # of max_response_tokens: a mean must leave room for the longest


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
