"""Projections with bands: what speculation would give on another model, GPU count, draft length or policy lag.

A band is p10 to p90 over draws of the structural variant, of its parameters, of the layouts that the assumptions
allow, of the learner's efficiency where it was not measured, and of the error that the calibration left; outside the
measured ranges that error grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np

from slipstream.simulator.cost import Array
from slipstream.simulator.cost.asynchronous_cost import Overlap, overlap
from slipstream.simulator.cost.iteration import CostModel, network_collective
from slipstream.simulator.cost.learner_step import Learner
from slipstream.simulator.cost.parameters import IDEAL
from slipstream.simulator.cost.rollout import Trace, slowest_engine
from slipstream.simulator.fit.calibration import Calibration
from slipstream.simulator.fit.ensemble import Draw, Ensemble
from slipstream.simulator.project.scenarios import Scenario
from slipstream.statistics import Spread, spread
from slipstream.types import StageTimes

_NUM_DRAWS = 96
_IDEAL_STACK = "an ideal stack: no host, launch or draft overhead, all peaks reached"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedPoint:
    """Speedups of speculation over autoregressive decoding in one setting, with what to be wary of."""

    model: str
    hardware: str
    num_gpus: int
    lag: int
    k: int
    acceptance_length: float  # assumed
    rollout_speedup: Spread
    step_speedup: Spread
    autoregressive_step_s: Spread
    speculative_step_s: Spread
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """Bands of what was asked, and the steps of the draw whose step speedup is the median."""

    point: ProjectedPoint
    autoregressive: StageTimes
    speculative: StageTimes


def project(
    scenario: Scenario,
    ensemble: Ensemble,
    learner: Learner,
    *,
    layouts: Sequence[Scenario] = (),
    num_draws: int = _NUM_DRAWS,
    seed: int = 0,
) -> Projection:
    """Both arms of `scenario`, with bands.

    Args:
        layouts: other readings of what the scenario only assumes; draws are spread evenly over all of them.
    """
    scenarios = (scenario, *layouts)
    batch = max(float(each.shape.per_engine) for each in scenarios)
    sampled = ensemble.draws(k=scenario.k, batch=batch, count=num_draws, seed=seed)
    latency = network_collective()
    around = np.random.default_rng([seed, 1]).standard_normal((num_draws, 2))  # apart from the calibration's draws
    collectives_s = latency.median * np.exp(latency.log_sd * around[:, 1])
    drawn = zip(cycle(scenarios), sampled, around[:, 0].tolist(), collectives_s.tolist(), strict=False)
    arms = [_arms(each, learner, draw, deviation, latency_s) for each, draw, deviation, latency_s in drawn]
    return _summary(scenario, arms, ensemble.best.validity.warnings(k=scenario.k, batch=batch))


def project_ideal(scenario: Scenario, learner: Learner, *, layouts: Sequence[Scenario] = ()) -> Projection:
    """The same on a stack without overhead: peaks reached, nothing but the roofline. Bands over the layouts alone."""
    draw = Draw(parameters=IDEAL, autoregressive_error=1.0, speculative_error=1.0)
    arms = [_arms(each, learner, draw, 0.0, 0.0) for each in (scenario, *layouts)]
    return _summary(scenario, arms, (_IDEAL_STACK,))


def speedup_map(
    scenario: Scenario, calibration: Calibration, *, ks: Sequence[int], acceptance_lengths: Sequence[float]
) -> Array:
    """Rollout speedup [len(ks), len(acceptance_lengths)] of the most probable parameters; NaN where AL > k + 1."""
    trace = slowest_engine(scenario.setting.lengths(scenario.mean_tokens), scenario.shape)
    model = calibration.model(scenario.setting)

    def seconds(k: int) -> float:
        return float(model.span_s(trace, k=k, tokens_per_iteration=1.0).sum())

    base_s = seconds(0)
    lengths = np.asarray(acceptance_lengths, dtype=np.float64)
    rows = [np.where(lengths <= k + 1, base_s / seconds(k) * lengths, np.nan) for k in ks]
    return np.stack(rows)


def best_of_map(scenario: Scenario, calibration: Calibration) -> Scenario:
    """The point of the k x acceptance map, k = 1 to 7, where the rollout is fastest."""
    ks, lengths = range(1, 8), [float(length) for length in range(1, 9)]
    found = speedup_map(scenario, calibration, ks=ks, acceptance_lengths=lengths)
    row, column = np.unravel_index(int(np.nanargmax(found)), found.shape)
    return replace(scenario, k=ks[row], acceptance_length=lengths[column])


def _arms(
    scenario: Scenario, learner: Learner, draw: Draw, deviation: float, network_collective_s: float
) -> tuple[Overlap, Overlap]:
    """The autoregressive and the speculative arm of a draw.

    Args:
        deviation: the learner's, see `Learner.stages`.
        network_collective_s: latency of a collective between domains.
    """
    setting, mean = scenario.setting, scenario.mean_tokens
    model = CostModel(setting=setting, parameters=draw.parameters, network_collective_s=network_collective_s)
    trainer = learner.stages(setting, num_gpus=scenario.training_gpus, mean_tokens=mean, deviation=deviation)

    def arm(k: int, length: float, error: float) -> Overlap:
        def seconds(trace: Trace) -> Array:
            return error * model.span_s(trace, k=k, tokens_per_iteration=length)

        lengths = setting.lengths(mean)
        return overlap(trainer, lengths=lengths, shape=scenario.shape, lag=scenario.lag, seconds=seconds)

    speculative = arm(scenario.k, scenario.acceptance_length, draw.speculative_error)
    return arm(0, 1.0, draw.autoregressive_error), speculative


def _summary(scenario: Scenario, arms: Sequence[tuple[Overlap, Overlap]], warnings: tuple[str, ...]) -> Projection:
    step_speedups = [base.step.step_s / spec.step.step_s for base, spec in arms]
    middle = int(np.argsort(step_speedups, kind="stable")[len(arms) // 2])
    point = ProjectedPoint(
        model=scenario.setting.model_shape.name,
        hardware=scenario.setting.accelerator.name,
        num_gpus=scenario.setting.num_gpus,
        lag=scenario.lag,
        k=scenario.k,
        acceptance_length=scenario.acceptance_length,
        rollout_speedup=spread([base.period_s / spec.period_s for base, spec in arms]),
        step_speedup=spread(step_speedups),
        autoregressive_step_s=spread([base.step.step_s for base, _ in arms]),
        speculative_step_s=spread([spec.step.step_s for _, spec in arms]),
        warnings=warnings,
    )
    base, spec = arms[middle]
    return Projection(point=point, autoregressive=base.step, speculative=spec.step)
