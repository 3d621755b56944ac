"""Projections with bands: what speculation would give on another model, GPU count, draft length or policy lag.

A band is p10 to p90 over draws of the structural variant, of its parameters, of the layouts that the assumptions
allow, and of the error that the calibration left; outside the measured ranges that error grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require
from slipstream.sim.acceptance import check_length
from slipstream.sim.asynchronous import overlap
from slipstream.sim.calibration import Calibration
from slipstream.sim.ensemble import NUM_DRAWS, Band, Draw, Ensemble, band
from slipstream.sim.iteration import Engine, generation_s, span_seconds
from slipstream.sim.lengths import LongTailed
from slipstream.sim.parameters import IDEAL, Regime
from slipstream.sim.rollout import RolloutShape, Trace, slowest_engine
from slipstream.sim.settings import Setting
from slipstream.sim.step import LearnerEfficiency, Step, learner_stages

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What to project. `acceptance_length` counts the bonus token; `lag` 0 is a synchronous, colocated step."""

    setting: Setting
    mean_tokens: float
    k: int
    acceptance_length: float
    lag: int = 0
    generation_fraction: float = 0.75  # of the GPUs, when lag >= 1; arXiv 2604.26779 has 12 of 16 nodes

    def __post_init__(self) -> None:
        check_length(self.k, self.acceptance_length)
        require(self.lag >= 0, "lag", "must be >= 0", self.lag)
        require(0 < self.generation_fraction < 1, "generation_fraction", "must lie in (0, 1)", self.generation_fraction)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Arms:
    """One draw's result: generation (its sustainable period when asynchronous) and step of both arms."""

    autoregressive_s: float
    speculative_s: float
    autoregressive: Step
    speculative: Step

    @property
    def rollout_speedup(self) -> float:
        """Autoregressive over speculative generation."""
        return self.autoregressive_s / self.speculative_s

    @property
    def step_speedup(self) -> float:
        """Autoregressive over speculative step."""
        return self.autoregressive.step_s / self.speculative.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """Bands of what was asked, the median draw's steps, and what to be wary of."""

    rollout_speedup: Band
    step_speedup: Band
    autoregressive_step_s: Band
    speculative_step_s: Band
    autoregressive: Step
    speculative: Step
    warnings: tuple[str, ...]


def project(
    scenario: Scenario,
    ensemble: Ensemble,
    learner: LearnerEfficiency,
    *,
    layouts: Sequence[Scenario] = (),
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> Projection:
    """Both arms of `scenario`, with bands.

    Args:
        layouts: other readings of what the scenario only assumes; draws are spread evenly over all of them.
    """
    scenarios = (scenario, *layouts)
    batch = max(float(_shape(each).per_engine) for each in scenarios)
    sampled = ensemble.draws(k=scenario.k, batch=batch, count=num_draws, seed=seed)
    prepared = [_Prepared.of(each, learner) for each in scenarios]
    arms = [prepared[index % len(prepared)].arms(draw) for index, draw in enumerate(sampled)]
    return _summary(arms, ensemble.warnings(k=scenario.k, batch=batch))


def project_ideal(scenario: Scenario, learner: LearnerEfficiency, *, layouts: Sequence[Scenario] = ()) -> Projection:
    """The same on a stack without overhead: peaks reached, nothing but the roofline. Bands over the layouts alone."""
    draw = Draw(parameters=IDEAL, regime=Regime.SMOOTH, mean_tokens={}, autoregressive_error=1.0, speculative_error=1.0)
    arms = [_Prepared.of(each, learner).arms(draw) for each in (scenario, *layouts)]
    return _summary(arms, ("an ideal stack: no host, launch or draft overhead, all peaks reached",))


def speedup_map(
    scenario: Scenario, calibration: Calibration, *, ks: Sequence[int], acceptance_lengths: Sequence[float]
) -> Array:
    """Rollout speedup [len(ks), len(acceptance_lengths)] of the most probable parameters; NaN where AL > k + 1."""
    trace = slowest_engine(scenario.setting.lengths(scenario.mean_tokens), _shape(scenario))
    engine, parameters = scenario.setting.engine(), calibration.parameters()

    def seconds(k: int) -> float:
        return generation_s(trace, engine, parameters, k=k, tokens_per_iteration=1.0, regime=calibration.regime)

    base_s = seconds(0)
    lengths = np.asarray(acceptance_lengths, dtype=np.float64)
    rows = [np.where(lengths <= k + 1, base_s / seconds(k) * lengths, np.nan) for k in ks]
    return np.stack(rows)


def best_of_map(scenario: Scenario, calibration: Calibration, *, max_k: int = 7) -> Scenario:
    """The point of the k x acceptance map, k = 1 to `max_k`, where the rollout is fastest."""
    ks, lengths = tuple(range(1, max_k + 1)), tuple(float(length) for length in range(1, max_k + 2))
    found = speedup_map(scenario, calibration, ks=ks, acceptance_lengths=lengths)
    row, column = np.unravel_index(int(np.nanargmax(found)), found.shape)
    return replace(scenario, k=ks[row], acceptance_length=lengths[column])


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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Prepared:
    """A scenario with everything that no draw changes."""

    scenario: Scenario
    engine: Engine
    shape: RolloutShape
    lengths: LongTailed
    trace: Trace
    trainer: Step

    @staticmethod
    def of(scenario: Scenario, learner: LearnerEfficiency) -> _Prepared:
        setting, shape = scenario.setting, _shape(scenario)
        lengths = setting.lengths(scenario.mean_tokens)
        trainer = learner_stages(
            learner,
            model=setting.model_shape,
            hardware=setting.accelerator,
            num_gpus=scenario.training_gpus,
            tokens=setting.learner_tokens,
            precision=setting.learner_precision,
        )
        return _Prepared(
            scenario=scenario,
            engine=setting.engine(),
            shape=shape,
            lengths=lengths,
            trace=slowest_engine(lengths, shape),
            trainer=trainer,
        )

    def arms(self, draw: Draw) -> Arms:
        base_s, base = self._arm(draw, 0, 1.0, draw.autoregressive_error)
        spec_s, spec = self._arm(draw, self.scenario.k, self.scenario.acceptance_length, draw.speculative_error)
        return Arms(autoregressive_s=base_s, speculative_s=spec_s, autoregressive=base, speculative=spec)

    def _arm(self, draw: Draw, k: int, length: float, error: float) -> tuple[float, Step]:
        def seconds(trace: Trace) -> Array:
            return error * span_seconds(
                trace, self.engine, draw.parameters, k=k, tokens_per_iteration=length, regime=draw.regime
            )

        if self.scenario.lag == 0:
            drained_s = float(seconds(self.trace).sum())
            return drained_s, self.trainer.with_generation(drained_s)
        found = overlap(self.trainer, lengths=self.lengths, shape=self.shape, lag=self.scenario.lag, seconds=seconds)
        return found.period_s, found.step


def _shape(scenario: Scenario) -> RolloutShape:
    return scenario.setting.shape(scenario.generation_gpus)


def _summary(arms: Sequence[Arms], found: tuple[str, ...]) -> Projection:
    middle = sorted(arms, key=lambda each: each.step_speedup)[len(arms) // 2]
    return Projection(
        rollout_speedup=band([each.rollout_speedup for each in arms]),
        step_speedup=band([each.step_speedup for each in arms]),
        autoregressive_step_s=band([each.autoregressive.step_s for each in arms]),
        speculative_step_s=band([each.speculative.step_s for each in arms]),
        autoregressive=middle.autoregressive,
        speculative=middle.speculative,
        warnings=found,
    )
