"""Projections of speculation, with bands, to other models, GPU counts, draft lengths and policy lags.

A band is p10 to p90 over samples of the structural variant, its parameters, layouts within the assumptions, the
learner's efficiency where it was not measured, and the residual error of the calibration, which grows outside the
measured ranges. A run is projected from its own calibration, and a request from the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from slipstream.catalog import BYTES, Precision, load_hardware, load_model
from slipstream.config import (
    Checked,
    Fix,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    require,
)
from slipstream.records.files import write_record
from slipstream.records.run import LayoutRecord
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.simulator import Array
from slipstream.simulator.calibration import CalibrationRecord, Draw, Ensemble, check_length
from slipstream.simulator.iteration import CostModel, Drafting
from slipstream.simulator.observed import (
    PAPER_SETTING,
    CheckRecord,
    RunCalibration,
    calibrate_paper,
    calibrate_run,
    paper_learner,
    run_setting,
)
from slipstream.simulator.rollout import RolloutShape, Trace
from slipstream.simulator.settings import IDEAL, Setting, load_belief, load_setting
from slipstream.simulator.step_cost import Learner, Overlap, overlap
from slipstream.statistics import Spread, spread
from slipstream.types import Arm

PUBLISHED_MODEL = "qwen3-235b-a22b"  # model of the paper's own projections, on GB200
_LARGE_SETTING = "paper-235b"
_MAX_ROLLOUTS = 1_000_000
_GENERATION_FRACTION = 0.75  # 12 of 16 nodes in arXiv 2604.26779
_WEIGHT_SHARE = 0.5  # largest fraction of an engine's memory for weights; the rest is for the key-value cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Point to project; `acceptance_length` includes the bonus token, and `lag` 0 is a synchronous, colocated step."""

    setting: Setting
    mean_tokens: float
    k: int
    acceptance_length: float
    lag: int = 0
    generation_fraction: float = _GENERATION_FRACTION  # fraction of the GPUs, used if lag >= 1
    drafting: Drafting = Drafting.EAGLE3

    def __post_init__(self) -> None:
        check_length(self.k, self.acceptance_length)

    @property
    def generation_gpus(self) -> int:
        """Number of GPUs that generate."""
        gpus = self.setting.num_gpus
        return gpus if self.lag == 0 else max(1, round(gpus * self.generation_fraction))

    @property
    def training_gpus(self) -> int:
        """Number of GPUs that train; all GPUs when colocated."""
        gpus = self.setting.num_gpus
        return gpus if self.lag == 0 else max(1, gpus - self.generation_gpus)

    @property
    def shape(self) -> RolloutShape:
        """Rollouts of a step over the engines of the GPUs that generate."""
        return self.setting.shape(self.generation_gpus)


class ProjectionRequest(Checked):
    """Request of a user; 0 takes the layout's value, and `acceptance_length` includes the bonus token."""

    model: str
    hardware: str = "gb200"
    num_gpus: PositiveInt
    k: NonNegativeInt
    acceptance_length: PositiveFloat
    lag: NonNegativeInt = 0  # 0: synchronous and colocated
    generation_fraction: Fraction = _GENERATION_FRACTION  # of the GPUs, with a lag
    gpus_per_engine: NonNegativeInt = 0
    num_rollouts: Annotated[NonNegativeInt, Field(le=_MAX_ROLLOUTS), Fix("each of them is simulated")] = 0
    mean_tokens: NonNegativeFloat = 0.0
    drafting: Drafting = Drafting.EAGLE3

    def scenario(self) -> Scenario:
        """Apply the request to the published layout of the most similar model, or refuse one that does not fit."""
        sparse = load_model(self.model).num_experts > 0
        base = load_setting(_LARGE_SETTING if sparse else PAPER_SETTING)
        known = (self.model, self.hardware) == (base.model, base.hardware)
        fitting = base.gpus_per_engine if known else _fitting_gpus(self.model, self.hardware, base.precision)
        engine = self.gpus_per_engine or fitting
        require(self.num_gpus >= engine, "num_gpus", f"must hold an engine of {engine} GPUs", self.num_gpus)
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
            drafting=self.drafting,
        )
        is_split = engine <= scenario.generation_gpus < self.num_gpus
        rule = f"must leave, of {self.num_gpus} GPUs, an engine's {engine} for generation and one for training"
        require(self.lag == 0 or is_split, "generation_fraction", rule, self.generation_fraction)
        return scenario


def assumed_layouts(scenario: Scenario) -> tuple[Scenario, ...]:
    """List alternatives of a layout that was not published: GPUs an engine and mean length, each up and down."""
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
    """Find the smallest power of two of GPUs whose memory holds twice the weights."""
    needed = load_model(model).total_parameters * BYTES[precision]
    gpus = 1
    while needed > _WEIGHT_SHARE * gpus * load_hardware(hardware).memory_bytes:
        gpus *= 2
    return gpus


_NUM_DRAWS = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedPoint:
    """Projected speedups of speculation over autoregressive decoding at one point, with warnings."""

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


def project(
    scenario: Scenario,
    ensemble: Ensemble,
    learner: Learner,
    *,
    layouts: Sequence[Scenario] = (),
    num_draws: int = _NUM_DRAWS,
    seed: int = 0,
) -> ProjectedPoint:
    """Project both arms of a scenario, with bands, from samples that are spread evenly over it and `layouts`."""
    scenarios = (scenario, *layouts)
    batch = max(float(each.shape.per_engine) for each in scenarios)
    sampled = ensemble.draws(k=scenario.k, batch=batch, count=num_draws, seed=seed)
    latency = load_belief("links", "network_collective_s")
    around = np.random.default_rng([seed, 1]).standard_normal((num_draws, 2))  # apart from the ensemble's
    collectives_s = latency.median * np.exp(latency.log_sd * around[:, 1])
    drawn = zip(cycle(scenarios), sampled, around[:, 0].tolist(), collectives_s.tolist(), strict=False)
    arms = [_arms(each, learner, draw, deviation, latency_s) for each, draw, deviation, latency_s in drawn]
    return _summary(scenario, arms, ensemble.best.validity.warnings(k=scenario.k, batch=batch))


def project_ideal(scenario: Scenario, learner: Learner, *, layouts: Sequence[Scenario] = ()) -> ProjectedPoint:
    """Project both arms on a stack without overhead, which runs at the roofline; bands cover the layouts alone."""
    draw = Draw(parameters=IDEAL, autoregressive_error=1.0, speculative_error=1.0)
    arms = [_arms(each, learner, draw, 0.0, 0.0) for each in (scenario, *layouts)]
    return _summary(scenario, arms, ("an ideal stack: no host, launch or draft overhead, all peaks reached",))


def _arms(
    scenario: Scenario, learner: Learner, draw: Draw, deviation: float, network_collective_s: float
) -> tuple[Overlap, Overlap]:
    """Simulate the autoregressive and the speculative arm for one sample; `deviation` is that of `Learner.stages`."""
    setting, mean = scenario.setting, scenario.mean_tokens
    model = CostModel(setting=setting, parameters=draw.parameters, network_collective_s=network_collective_s)
    trainer = learner.stages(setting, num_gpus=scenario.training_gpus, mean_tokens=mean, deviation=deviation)

    def arm(k: int, length: float, error: float) -> Overlap:
        def seconds(trace: Trace) -> Array:
            return error * model.span_s(trace, k=k, tokens_per_iteration=length, drafting=scenario.drafting)

        lengths = setting.lengths(mean)
        return overlap(trainer, lengths=lengths, shape=scenario.shape, lag=scenario.lag, seconds=seconds)

    error = draw.speculative_error if scenario.k else draw.autoregressive_error  # without drafts it is the same arm
    return arm(0, 1.0, draw.autoregressive_error), arm(scenario.k, scenario.acceptance_length, error)


def _summary(scenario: Scenario, arms: Sequence[tuple[Overlap, Overlap]], warnings: tuple[str, ...]) -> ProjectedPoint:
    return ProjectedPoint(
        model=scenario.setting.model_shape.name,
        hardware=scenario.setting.accelerator.name,
        num_gpus=scenario.setting.num_gpus,
        lag=scenario.lag,
        k=scenario.k,
        acceptance_length=scenario.acceptance_length,
        rollout_speedup=spread([base.period_s / spec.period_s for base, spec in arms]),
        step_speedup=spread([base.step.step_s / spec.step.step_s for base, spec in arms]),
        autoregressive_step_s=spread([base.step.step_s for base, _ in arms]),
        speculative_step_s=spread([spec.step.step_s for _, spec in arms]),
        warnings=warnings,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedProjection:
    """Projections of a request, and the assumptions about its layout."""

    ideal: ProjectedPoint
    calibrated: ProjectedPoint
    assumptions: tuple[str, ...]


def project_request(request: ProjectionRequest, *, seed: int = 0) -> RequestedProjection:
    """Project a request on an ideal stack, and from a calibration on the paper's measurements."""
    scenario, learner = request.scenario(), paper_learner()
    layouts, sources = assumed_layouts(scenario), scenario.setting.sources
    given = {"gpus_per_engine": request.gpus_per_engine, "num_rollouts": request.num_rollouts}
    given["mean_response_tokens"] = bool(request.mean_tokens)
    assumed = [name for name, source in sources.items() if source.startswith("assumed") and not given.get(name)]
    return RequestedProjection(
        ideal=project_ideal(scenario, learner, layouts=layouts),
        calibrated=project(scenario, calibrate_paper(), learner, layouts=layouts, seed=seed),
        assumptions=tuple(f"{name}: {sources[name]}" for name in assumed),
    )


def write_request(request: ProjectionRequest, directory: Path, *, seed: int = 0) -> Path:
    """Write projection.json of a request into `directory`; returns its path."""
    return write_record(project_request(request, seed=seed), directory / "projection.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionRecord:
    """Record of the stage `project_speedup`; all fields but those named measured are projected."""

    run_calibration: CalibrationRecord | None  # None: the recipe names no model and hardware of the simulator
    run_check: CheckRecord | None  # None: no calibration, or no speculative arm with k > 0
    from_run: tuple[ProjectedPoint, ...]  # every k of the sweep, on the run's machine


def project_speedup(
    arms: Sequence[ArmRecord],
    tuning: TuningRecord | None,
    *,
    layout: LayoutRecord | None,
    execution: str,
) -> ProjectionRecord:
    """Calibrate on a run, check on its speculative arm and project; nothing without a layout, or for a single arm."""
    has_both = tuning is not None and any(arm.arm is Arm.AUTOREGRESSIVE for arm in arms)
    if layout is None or not has_both:
        return ProjectionRecord(run_calibration=None, run_check=None, from_run=())
    run = calibrate_run(arms, tuning, run_setting(layout))
    return ProjectionRecord(
        run_calibration=run.ensemble.record(execution),
        run_check=run.check,
        from_run=tuple(project_run(run)),
    )


def project_run(run: RunCalibration) -> list[ProjectedPoint]:
    """Project every k of the sweep on the run's machine, at the acceptance lengths of the sweep's profile."""
    learner = Learner(measured=run.step, setting=run.setting, mean_tokens=run.mean_tokens)
    scenarios = [
        Scenario(setting=run.setting, mean_tokens=run.mean_tokens, k=k, acceptance_length=run.profile.length(k))
        for k in run.swept_ks
    ]
    return [project(scenario, run.ensemble, learner) for scenario in scenarios]
