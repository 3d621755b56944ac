"""What the simulator says of a run: a stage of the chain, and the record that it writes.

Everything in these records is projected, but for the fields whose names begin with `measured`. From the run's own
calibration come other draft lengths on the same machine; from the paper's come the models and clusters of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.records import RunRecord, read_record, write_record
from slipstream.sim import paper
from slipstream.sim.calibration import Calibration
from slipstream.sim.ensemble import Band, Ensemble
from slipstream.sim.observed import RunCalibration, calibrate_run
from slipstream.sim.projection import Projection, Scenario, assumed_layouts, best_of_map, project, project_ideal
from slipstream.sim.settings import Setting, load_setting
from slipstream.sim.step import LearnerEfficiency, learner_efficiency

TINY_SETTING = "cpu-2core"
LARGE_SETTING = "paper-235b"
_LARGE_WORKLOAD = "rl_think"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedBand:
    """10th percentile, median and 90th percentile."""

    p10: float
    median: float
    p90: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedPoint:
    """Speedups of speculation over autoregressive decoding in one setting."""

    model: str
    hardware: str
    num_gpus: int
    lag: int
    k: int
    acceptance_length: float  # assumed
    rollout_speedup: ProjectedBand
    step_speedup: ProjectedBand
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPoint:
    """The paper's own projection, and ours beside it: on an ideal stack, and as calibrated on its measurements."""

    published_rollout_speedup: float
    published_step_speedup: float
    ideal: ProjectedPoint
    calibrated: ProjectedPoint


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
class CheckRecord:
    """The arm that the calibration never saw. Seconds of a step's generation, median over the arm."""

    k: int
    acceptance_length: float  # of the sweep
    measured_s: float
    predicted_s: float
    predicted_p10_s: float
    predicted_p90_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionRecord:
    """What `project_speedup` hands to the report."""

    run_calibration: CalibrationRecord
    run_check: CheckRecord | None  # None: no speculative arm with k > 0
    from_run: tuple[ProjectedPoint, ...]  # the run's machine, every k of its sweep
    paper_calibration: CalibrationRecord
    from_paper: tuple[PublishedPoint, ...]


def project_speedup(run: RunRecord) -> ProjectionRecord:
    """Calibrate on `run`, check against its speculative arm, and project; separately, the same from the paper's figures.

    Raises:
        ConfigError: the run has no autoregressive arm or no sweep.
    """
    calibrated = calibrate_run(run, _own_setting(run))
    from_paper = paper.calibrate_paper()
    return ProjectionRecord(
        run_calibration=calibration_record(run.execution, calibrated.ensemble),
        run_check=_check(calibrated),
        from_run=tuple(project_run(calibrated, sorted({point.k for point in run.tuning.points if point.k > 0}))),
        paper_calibration=calibration_record("arXiv 2604.26779, measured", from_paper),
        from_paper=tuple(project_published(from_paper)),
    )


def write_projection(run_json: Path, directory: Path) -> Path:
    """Read run.json, write projection.json into `directory`; its path."""
    return write_record(project_speedup(read_record(RunRecord, run_json)), directory / "projection.json")


def project_run(calibrated: RunCalibration, ks: Sequence[int]) -> list[ProjectedPoint]:
    """Every k of `ks` on the run's own machine, at the acceptance lengths of its sweep's profile."""
    learner = _learner(calibrated)
    points = []
    for k in ks:
        scenario = Scenario(
            setting=calibrated.setting,
            mean_tokens=calibrated.mean_tokens,
            k=k,
            acceptance_length=calibrated.profile.length(k),
        )
        points.append(point(scenario, project(scenario, calibrated.ensemble, learner)))
    return points


def project_published(ensemble: Ensemble) -> list[PublishedPoint]:
    """The points that the paper's closed simulator projects, from a calibration on the paper's measurements."""
    learner = paper_learner()
    setting = load_setting(LARGE_SETTING)
    points = []
    for reference in paper.read_simulator_reference().projected:
        scenario = Scenario(
            setting=setting.on(reference.num_gpus),
            mean_tokens=setting.mean_response_tokens[_LARGE_WORKLOAD],
            k=reference.k or 0,
            acceptance_length=reference.acceptance_length or 1.0,
            lag=reference.lag,
        )
        if reference.k is None:
            scenario = best_of_map(scenario, ensemble.best)
        layouts = assumed_layouts(scenario)
        points.append(
            PublishedPoint(
                published_rollout_speedup=reference.rollout_speedup,
                published_step_speedup=reference.step_speedup,
                ideal=point(scenario, project_ideal(scenario, learner, layouts=layouts)),
                calibrated=point(scenario, project(scenario, ensemble, learner, layouts=layouts)),
            )
        )
    return points


def paper_learner() -> LearnerEfficiency:
    """How efficiently the paper's learner ran: mean of its four measured steps."""
    setting = load_setting("paper-8b")
    return learner_efficiency(
        paper.mean_other_stages(list(paper.paper_steps().values())),
        model=setting.model_shape,
        hardware=setting.accelerator,
        num_gpus=setting.num_gpus,
        tokens=setting.learner_tokens,
        precision=setting.learner_precision,
    )


def calibration_record(source: str, ensemble: Ensemble) -> CalibrationRecord:
    """Variants and cells of a calibration, as plain figures."""
    return CalibrationRecord(
        source=source,
        variants=tuple(
            _variant(member, float(weight)) for member, weight in zip(ensemble.members, ensemble.weights, strict=True)
        ),
        cells=tuple(
            FittedCell(label=cell.label, measured_s=cell.generation_s, simulated_s=float(seconds))
            for cell, seconds in zip(ensemble.best.cells, ensemble.fitted_s, strict=True)
        ),
    )


def point(scenario: Scenario, projection: Projection) -> ProjectedPoint:
    """A projection as plain figures."""
    return ProjectedPoint(
        model=scenario.setting.model_shape.name,
        hardware=scenario.setting.accelerator.name,
        num_gpus=scenario.setting.num_gpus,
        lag=scenario.lag,
        k=scenario.k,
        acceptance_length=scenario.acceptance_length,
        rollout_speedup=_band(projection.rollout_speedup),
        step_speedup=_band(projection.step_speedup),
        warnings=projection.warnings,
    )


def _own_setting(run: RunRecord) -> Setting:
    setting = load_setting(TINY_SETTING)
    means = setting.mean_response_tokens
    # RL-Think responses may be longer: configs/tiny.yaml has a limit of its own for them.
    longest = {"rl_think": 384}.get(run.workload, setting.max_response_tokens)
    return replace(setting, max_response_tokens=longest, mean_response_tokens=means)


def _learner(calibrated: RunCalibration) -> LearnerEfficiency:
    setting = calibrated.setting
    return learner_efficiency(
        calibrated.step,
        model=setting.model_shape,
        hardware=setting.accelerator,
        num_gpus=setting.num_gpus,
        tokens=setting.learner_tokens,
        precision=setting.learner_precision,
    )


def _check(calibrated: RunCalibration) -> CheckRecord | None:
    check = calibrated.check
    if check is None:
        return None
    return CheckRecord(
        k=check.k,
        acceptance_length=check.acceptance_length,
        measured_s=check.measured_s,
        predicted_s=check.predicted_s,
        predicted_p10_s=check.band.p10,
        predicted_p90_s=check.band.p90,
    )


def _variant(member: Calibration, weight: float) -> VariantRecord:
    return VariantRecord(
        regime=member.regime.value,
        weight=weight,
        num_parameters=len(member.names),
        effective_parameters=member.effective_parameters,
        rms_error=member.rms_error,
        max_error=member.max_error,
    )


def _band(band: Band) -> ProjectedBand:
    return ProjectedBand(p10=band.p10, median=band.median, p90=band.p90)
