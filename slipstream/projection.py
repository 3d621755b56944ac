"""What the simulator says of a run: a stage of the chain, and the record that it writes.

Everything in these records is projected, but for the fields whose names begin with `measured`. From the run's own
calibration come other draft lengths on the same machine; from the paper's come the models and clusters of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.config import require
from slipstream.kernel_tables import read_gemms
from slipstream.projected_figures import ProjectedFigures, RunningBatch, projected_figures, running_batches
from slipstream.recipe import Recipe
from slipstream.records import ArmRecord, LayoutRecord, TuningRecord, read_record, write_record
from slipstream.sim import paper
from slipstream.sim.calibration import Calibration
from slipstream.sim.ensemble import Band, Ensemble
from slipstream.sim.hardware import BYTES, Precision
from slipstream.sim.models import load_model
from slipstream.sim.observed import RunCalibration, calibrate_run
from slipstream.sim.projection import Projection, Scenario, assumed_layouts, best_of_map, project, project_ideal
from slipstream.sim.settings import Setting, load_setting
from slipstream.sim.step import LearnerEfficiency, learner_efficiency

_CPU_SETTING = "cpu-2core"
_DENSE_SETTING = "paper-8b"
_LARGE_SETTING = "paper-235b"
_DRAWN_K, _DRAWN_LENGTH = 3, 3.0  # of the figures: the first point that the paper projects
_WEIGHT_SHARE = 0.5  # of an engine's memory at most: the rest is for the key-value cache


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionRequest:
    """What a user asks for. 0 takes the layout's own value; `acceptance_length` counts the bonus token."""

    model: str
    hardware: str = "gb200"
    num_gpus: int
    k: int
    acceptance_length: float
    lag: int = 0  # 0: synchronous and colocated
    generation_fraction: float = 0.75  # of the GPUs, with a lag
    gpus_per_engine: int = 0
    num_rollouts: int = 0
    mean_tokens: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_gpus", "gpus_per_engine", "num_rollouts"):
            value: int = getattr(self, name)
            least = 1 if name == "num_gpus" else 0
            require(value >= least, name, f"must be >= {least}", value)
        require(self.mean_tokens >= 0, "mean_tokens", "must be >= 0", self.mean_tokens)

    def scenario(self) -> Scenario:
        """The request on the layout that comes nearest to its model.

        Raises:
            ConfigError: model or hardware is unknown, or the model does not fit on the GPUs.
        """
        sparse = load_model(self.model).num_experts > 0
        base = load_setting(_LARGE_SETTING if sparse else _DENSE_SETTING)
        setting = replace(base, model=self.model, hardware=self.hardware)
        known = (self.model, self.hardware) == (base.model, base.hardware)
        setting = replace(
            setting,
            num_gpus=self.num_gpus,
            gpus_per_engine=self.gpus_per_engine or (base.gpus_per_engine if known else _fitting_gpus(setting)),
            num_rollouts=self.num_rollouts or base.num_rollouts,
        )
        return Scenario(
            setting=setting,
            mean_tokens=self.mean_tokens or max(base.mean_response_tokens.values()),
            k=self.k,
            acceptance_length=self.acceptance_length,
            lag=self.lag,
            generation_fraction=self.generation_fraction,
        )


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
    autoregressive_step_s: ProjectedBand
    speculative_step_s: ProjectedBand
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPoint:
    """The paper's own projection, and ours beside it: on an ideal stack, and as calibrated on its measurements."""

    published_rollout_speedup: float
    published_step_speedup: float
    ideal: ProjectedPoint
    calibrated: ProjectedPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedProjection:
    """What a request gives, and what of its layout is assumed."""

    ideal: ProjectedPoint
    calibrated: ProjectedPoint
    assumptions: tuple[str, ...]


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
    """The arm that the calibration never saw. Seconds of a step's generation, mean over the arm."""

    k: int
    acceptance_length: float  # of the sweep
    measured_s: float
    predicted_s: float
    predicted_p10_s: float
    predicted_p90_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionRecord:
    """What `project_speedup` hands to the report."""

    run_calibration: CalibrationRecord | None  # None: the recipe does not say on what it ran
    run_check: CheckRecord | None  # None: no speculative arm with k > 0, or no calibration
    from_run: tuple[ProjectedPoint, ...]  # the run's machine, every k of its sweep
    paper_calibration: CalibrationRecord
    from_paper: tuple[PublishedPoint, ...]
    figures: ProjectedFigures


def project_speedup(
    arms: Sequence[ArmRecord], tuning: TuningRecord, *, layout: LayoutRecord | None, execution: str
) -> ProjectionRecord:
    """Calibrate on a run, check on its speculative arm, and project; separately, project from the paper's figures.

    Args:
        layout: on what the run ran; None leaves out everything that would be projected from it.
    Raises:
        ConfigError: the run has no autoregressive arm or no sweep.
    """
    from_paper = paper.calibrate_paper()
    calibrated = None
    if layout is not None:
        calibrated = calibrate_run(arms, tuning, run_setting(layout), target=_target(layout.hardware))
    ks = sorted({point.k for point in tuning.points if point.k > 0})
    return ProjectionRecord(
        run_calibration=None if calibrated is None else calibration_record(execution, calibrated.ensemble),
        run_check=None if calibrated is None else _check(calibrated),
        from_run=() if calibrated is None else tuple(project_run(calibrated, ks)),
        paper_calibration=calibration_record("arXiv 2604.26779, measured", from_paper),
        from_paper=tuple(project_published(from_paper)),
        figures=_figures(calibrated, from_paper),
    )


def write_projection(
    directory: Path, *, arms: Sequence[Path], tuning: Path, layout: LayoutRecord | None, execution: str
) -> Path:
    """Read the arms' and the tuning's records, write projection.json into `directory`; its path."""
    record = project_speedup(
        [read_record(ArmRecord, arm / "arm.json") for arm in arms],
        read_record(TuningRecord, tuning / "tuning.json"),
        layout=layout,
        execution=execution,
    )
    return write_record(record, directory / "projection.json")


def write_request(request: ProjectionRequest, directory: Path) -> Path:
    """Project `request` from the paper's measurements, write projection.json into `directory`; its path."""
    return write_record(project_request(request), directory / "projection.json")


def project_request(request: ProjectionRequest, *, kernel_tables: bool = False) -> RequestedProjection:
    """What an ideal stack would give, and what the paper's measurements let expect.

    Args:
        kernel_tables: take matrix multiplications from NVIDIA's tables, in the calibration and in the projection.
    Raises:
        ConfigError: the tables are not installed, or one of the two that are needed fails its audit.
    """
    scenario, learner = request.scenario(), paper_learner()
    measured_on = load_setting(_DENSE_SETTING)
    if kernel_tables:
        setting = scenario.setting
        scenario = replace(scenario, setting=replace(setting, gemms=read_gemms(setting.hardware, setting.precision)))
        measured_on = replace(measured_on, gemms=read_gemms(measured_on.hardware, measured_on.precision))
    layouts = assumed_layouts(scenario)
    calibrated = project(scenario, paper.calibrate_paper(setting=measured_on), learner, layouts=layouts)
    return RequestedProjection(
        ideal=point(scenario, project_ideal(scenario, learner, layouts=layouts)),
        calibrated=point(scenario, calibrated),
        assumptions=tuple(
            f"{name}: {source}" for name, source in scenario.setting.sources.items() if source.startswith("assumed")
        ),
    )


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
    setting = load_setting(_LARGE_SETTING)
    points = []
    for reference in paper.read_simulator_reference().projected:
        scenario = Scenario(
            setting=setting.on(reference.num_gpus),
            mean_tokens=max(setting.mean_response_tokens.values()),
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
    setting = load_setting(_DENSE_SETTING)
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
        autoregressive_step_s=_band(projection.autoregressive_step_s),
        speculative_step_s=_band(projection.speculative_step_s),
        warnings=projection.warnings,
    )


def recipe_layout(recipe: Recipe) -> LayoutRecord | None:
    """On what a run of `recipe` runs, if it says so."""
    if recipe.simulator is None:
        return None
    engine = recipe.engine
    return LayoutRecord(
        model=recipe.simulator.model,
        hardware=recipe.simulator.hardware,
        precision=engine.dtype,
        learner_precision=recipe.learner.dtype,
        num_gpus=engine.num_engines * engine.tensor_parallel_size,
        gpus_per_engine=engine.tensor_parallel_size,
        max_response_tokens=recipe.sampling.max_response_tokens,
    )


def run_setting(layout: LayoutRecord) -> Setting:
    """The layout of a run. What it does not hold (prompts, spread of lengths) is assumed as for its kind of machine."""
    base = load_setting(_CPU_SETTING if _target(layout.hardware) == "cpu" else _DENSE_SETTING)
    return replace(
        base,
        model=layout.model,
        hardware=layout.hardware,
        precision=Precision(layout.precision),
        learner_precision=Precision(layout.learner_precision),
        num_gpus=layout.num_gpus,
        gpus_per_engine=layout.gpus_per_engine,
        max_response_tokens=layout.max_response_tokens,
    )


def _target(hardware: str) -> str:
    """Whose priors a calibration starts from."""
    return "cpu" if hardware.startswith("cpu") else "gpu"


def _figures(calibrated: RunCalibration | None, from_paper: Ensemble) -> ProjectedFigures:
    running: tuple[RunningBatch, ...] = ()
    if calibrated is not None:
        check = calibrated.check
        drafted = {} if check is None else {check.k: check.acceptance_length}
        running = running_batches(
            calibrated.setting, calibrated.ensemble, mean_tokens=calibrated.mean_tokens, acceptance_lengths=drafted
        )
    setting = load_setting(_LARGE_SETTING)
    scenario = Scenario(
        setting=setting,
        mean_tokens=max(setting.mean_response_tokens.values()),
        k=_DRAWN_K,
        acceptance_length=_DRAWN_LENGTH,
    )
    return projected_figures(scenario, from_paper, paper_learner(), running=running)


def _fitting_gpus(setting: Setting) -> int:
    """The smallest power of two of GPUs whose memory holds the weights and as much again."""
    needed = setting.model_shape.total_parameters * BYTES[setting.precision]
    gpus = 1
    while needed > _WEIGHT_SHARE * gpus * setting.accelerator.memory_bytes:
        gpus *= 2
    return gpus


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
