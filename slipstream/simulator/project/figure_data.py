"""What the projection's figures draw, as plain figures: all of it projected."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.simulator.cost.rollout import slowest_engine
from slipstream.simulator.fit.observed import RunCalibration
from slipstream.simulator.fit.paper import calibrate_paper, paper_learner
from slipstream.simulator.project.projection import project, speedup_map
from slipstream.simulator.project.scenarios import PUBLISHED_MODEL, ProjectionRequest, Scenario
from slipstream.types import StageTimes

# The first point that the paper projects.
_DRAWN = ProjectionRequest(model=PUBLISHED_MODEL, num_gpus=512, k=3, acceptance_length=3.0)
_KS = (1, 2, 3, 4, 5, 6, 7)
_LENGTHS = tuple(1.0 + 0.25 * index for index in range(29))  # 1 to 8 = 7 + 1
_GPUS = (256, 512, 1024, 2048)
_LAGS = (0, 1, 2, 4)
_NUM_DRAWS = 24  # of a point of a line: its median alone is drawn


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
    projected = [project(point, calibrate_paper(), paper_learner(), num_draws=_NUM_DRAWS).point for point in points]
    return LagLine(lag=lag, num_gpus=_GPUS, step_speedups=tuple(point.step_speedup.median for point in projected))
