"""The record of the stage `project_speedup`: projections from a run's own calibration, and beside it from the paper's.

The run's calibration gives other draft lengths on its own machine, the paper's gives models and clusters of the paper,
and all that the page's figures draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.records.run import LayoutRecord
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.simulator.calibration import CalibrationRecord
from slipstream.simulator.observed import CheckRecord, RunCalibration, calibrate_run, run_setting
from slipstream.simulator.paper import calibrate_paper, paper_learner
from slipstream.simulator.projection import (
    PUBLISHED_MODEL,
    ProjectedPoint,
    ProjectionRequest,
    PublishedPoint,
    Scenario,
    project,
    project_published,
    speedup_map,
)
from slipstream.simulator.rollout import slowest_engine
from slipstream.simulator.step_cost import Learner
from slipstream.types import StageTimes

# The first point that the paper projects.
_DRAWN = ProjectionRequest(model=PUBLISHED_MODEL, num_gpus=512, k=3, acceptance_length=3.0)
_KS = (1, 2, 3, 4, 5, 6, 7)
_LENGTHS = tuple(1.0 + 0.25 * index for index in range(29))  # 1 to 8 = 7 + 1
_GPUS = (256, 512, 1024, 2048)
_LAGS = (0, 1, 2, 4)
_LINE_DRAWS = 24  # of a point of a line: its median alone is drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupMap:
    """Rollout speedup by draft length and acceptance length; None where the length exceeds k + 1."""

    ks: tuple[int, ...]
    acceptance_lengths: tuple[float, ...]
    rollout_speedups: tuple[tuple[float | None, ...], ...]  # [ks][acceptance_lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class LagLine:
    """Median step speedup over the number of GPUs at one policy lag."""

    lag: int
    num_gpus: tuple[int, ...]
    step_speedups: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningBatch:
    """Sequences that run in each span of a rollout, and the seconds that it lasts."""

    label: str
    batch: tuple[float, ...]
    span_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedFigures:
    """For one setting the map, the lines and the steps; for the run's own machine the running batch."""

    setting: str
    k: int  # of the lines and the steps
    acceptance_length: float
    speedup_map: SpeedupMap
    lag_lines: tuple[LagLine, ...]
    autoregressive: StageTimes
    speculative: StageTimes
    running: tuple[RunningBatch, ...]


def projected_figures(*, running: tuple[RunningBatch, ...]) -> ProjectedFigures:
    """Everything that is drawn, from the paper's measurements but for what is `running` on the run's machine."""
    scenario = _DRAWN.scenario()
    middle = project(scenario, calibrate_paper(), paper_learner())
    speedups = speedup_map(scenario, calibrate_paper().best, ks=_KS, acceptance_lengths=_LENGTHS).tolist()
    return ProjectedFigures(
        setting=f"{middle.point.model}, {middle.point.num_gpus} {middle.point.hardware}",
        k=_DRAWN.k,
        acceptance_length=_DRAWN.acceptance_length,
        speedup_map=SpeedupMap(
            ks=_KS,
            acceptance_lengths=_LENGTHS,
            rollout_speedups=tuple(tuple(None if x != x else x for x in row) for row in speedups),  # NaN is not JSON
        ),
        lag_lines=tuple(_lag_line(scenario, lag) for lag in _LAGS),
        autoregressive=middle.autoregressive,
        speculative=middle.speculative,
        running=running,
    )


def running_batches(run: RunCalibration) -> tuple[RunningBatch, ...]:
    """The most probable schedule of a run's slowest engine, autoregressive and with the speculative arm's k."""
    trace = slowest_engine(run.setting.lengths(run.mean_tokens), run.setting.shape())
    model = run.ensemble.best.model(run.setting)
    drafted = [] if run.check is None else [(run.check.k, run.check.acceptance_length)]
    found = []
    for k, length in [(0, 1.0), *drafted]:
        seconds = model.span_s(trace, k=k, tokens_per_iteration=length)
        label = f"k = {k}, acceptance length {length:.2f}" if k else "autoregressive"
        found.append(RunningBatch(label=label, batch=tuple(trace.batch_S.tolist()), span_s=tuple(seconds.tolist())))
    return tuple(found)


def _lag_line(scenario: Scenario, lag: int) -> LagLine:
    points = [replace(scenario, setting=replace(scenario.setting, num_gpus=gpus), lag=lag) for gpus in _GPUS]
    projected = [project(point, calibrate_paper(), paper_learner(), num_draws=_LINE_DRAWS).point for point in points]
    return LagLine(lag=lag, num_gpus=_GPUS, step_speedups=tuple(point.step_speedup.median for point in projected))


PAPER_SOURCE = "arXiv 2604.26779, measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionRecord:
    """Output of `project_speedup` for the report. All is projected but for fields whose names say measured."""

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
    run = None if layout is None else calibrate_run(arms, tuning, run_setting(layout))
    return ProjectionRecord(
        run_calibration=run.ensemble.record(execution) if run else None,
        run_check=run.check if run else None,
        from_run=tuple(project_run(run, swept_ks(tuning))) if run else (),
        paper_calibration=calibrate_paper().record(PAPER_SOURCE),
        from_paper=tuple(project_published()),
        figures=projected_figures(running=running_batches(run) if run else ()),
    )


def swept_ks(tuning: TuningRecord) -> list[int]:
    """Draft lengths of a sweep."""
    return sorted({point.k for point in tuning.points if point.k > 0})


def project_run(run: RunCalibration, ks: Sequence[int]) -> list[ProjectedPoint]:
    """Every k of `ks` on the run's own machine, at the acceptance lengths of its sweep's profile."""
    learner = Learner(measured=run.step, setting=run.setting, mean_tokens=run.mean_tokens)
    scenarios = [
        Scenario(setting=run.setting, mean_tokens=run.mean_tokens, k=k, acceptance_length=run.profile.length(k))
        for k in ks
    ]
    return [project(scenario, run.ensemble, learner).point for scenario in scenarios]
