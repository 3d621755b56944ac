"""What is projected: a layout, a draft length, an acceptance length and a policy lag."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from slipstream.config import (
    Checked,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Rule,
    ge,
    require_sizes,
)
from slipstream.simulator.cost.hardware import BYTES, Precision, load_hardware
from slipstream.simulator.cost.models import load_model
from slipstream.simulator.cost.rollout import RolloutShape
from slipstream.simulator.cost.settings import Setting, load_setting
from slipstream.simulator.fit.acceptance_by_position import check_length
from slipstream.simulator.fit.paper import PAPER_SETTING

PUBLISHED_MODEL = "qwen3-235b-a22b"  # that the paper's own simulator projects, on GB200
_LARGE_SETTING = "paper-235b"
_MAX_ROLLOUTS = 1_000_000
_SIMULATED = Rule(
    f"must be at most {_MAX_ROLLOUTS}, each of which is simulated", lambda number: number <= _MAX_ROLLOUTS
)
_GENERATION_FRACTION = 0.75  # arXiv 2604.26779 has 12 of 16 nodes
_WEIGHT_SHARE = 0.5  # of an engine's memory at most: the rest is for the key-value cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario(Checked):
    """What to project. `acceptance_length` counts the bonus token; `lag` 0 is a synchronous, colocated step."""

    setting: Setting
    mean_tokens: float
    k: int
    acceptance_length: float
    lag: NonNegativeInt = 0
    generation_fraction: Fraction = _GENERATION_FRACTION  # of the GPUs, when lag >= 1

    def _check(self) -> None:
        check_length(self.k, self.acceptance_length)

    @property
    def generation_gpus(self) -> int:
        """GPUs that generate."""
        gpus = self.setting.num_gpus
        return gpus if self.lag == 0 else max(1, round(gpus * self.generation_fraction))

    @property
    def training_gpus(self) -> int:
        """GPUs that train: the same ones when colocated."""
        gpus = self.setting.num_gpus
        return gpus if self.lag == 0 else max(1, gpus - self.generation_gpus)

    @property
    def shape(self) -> RolloutShape:
        """The rollouts, over the engines that generate."""
        return self.setting.shape(self.generation_gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionRequest(Checked):
    """What a user asks for. 0 takes the layout's own value; `acceptance_length` counts the bonus token."""

    model: str
    hardware: str = "gb200"
    num_gpus: Annotated[int, ge(1)]
    k: int
    acceptance_length: float
    lag: int = 0  # 0: synchronous and colocated
    generation_fraction: float = _GENERATION_FRACTION  # of the GPUs, with a lag
    gpus_per_engine: NonNegativeInt = 0
    num_rollouts: Annotated[int, ge(0), _SIMULATED] = 0
    mean_tokens: NonNegativeFloat = 0.0

    def _check(self) -> None:
        require_sizes(self)

    def scenario(self) -> Scenario:
        """The request on the layout that comes nearest to its model.

        Raises:
            ConfigError: model or hardware is unknown, or the model does not fit on the GPUs.
        """
        sparse = load_model(self.model).num_experts > 0
        base = load_setting(_LARGE_SETTING if sparse else PAPER_SETTING)
        known = (self.model, self.hardware) == (base.model, base.hardware)
        fitting = base.gpus_per_engine if known else _fitting_gpus(self.model, self.hardware, base.precision)
        engine = self.gpus_per_engine or fitting
        self._require(self.num_gpus >= engine, "num_gpus", f"must hold an engine of {engine} GPUs")
        setting = replace(
            base,
            model=self.model,
            hardware=self.hardware,
            num_gpus=self.num_gpus,
            gpus_per_engine=engine,
            num_rollouts=self.num_rollouts or base.num_rollouts,
        )
        scenario = Scenario(
            setting=setting,
            mean_tokens=self.mean_tokens or max(base.mean_response_tokens.values()),
            k=self.k,
            acceptance_length=self.acceptance_length,
            lag=self.lag,
            generation_fraction=self.generation_fraction,
        )
        self._require(
            self.lag == 0 or engine <= scenario.generation_gpus < self.num_gpus,
            "generation_fraction",
            f"must leave, of {self.num_gpus} GPUs, an engine's {engine} for generation and one for training",
        )
        return scenario


def assumed_layouts(scenario: Scenario) -> tuple[Scenario, ...]:
    """Other readings of a layout that no one published: GPUs an engine and mean length, each up and down."""
    setting, found = scenario.setting, []
    for gpus in (setting.gpus_per_engine // 2, setting.gpus_per_engine, setting.gpus_per_engine * 2):
        for factor in (1 / 1.5, 1.0, 1.5):
            mean = factor * scenario.mean_tokens
            known = (gpus, mean) == (setting.gpus_per_engine, scenario.mean_tokens)
            if known or not 1 <= gpus <= scenario.generation_gpus or mean >= setting.max_response_tokens:
                continue
            found.append(replace(scenario, setting=replace(setting, gpus_per_engine=gpus), mean_tokens=mean))
    return tuple(found)


def _fitting_gpus(model: str, hardware: str, precision: Precision) -> int:
    """The smallest power of two of GPUs whose memory holds the weights and as much again."""
    needed = load_model(model).total_parameters * BYTES[precision]
    gpus = 1
    while needed > _WEIGHT_SHARE * gpus * load_hardware(hardware).memory_bytes:
        gpus *= 2
    return gpus
