"""What is projected from a run's own calibration, and beside it from the paper's: the record of a stage of the chain.

The run's calibration gives other draft lengths on its own machine, the paper's gives models and clusters of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.config import require
from slipstream.records.run import LayoutRecord, RunRecord
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ArmRecord
from slipstream.simulator.cost.hardware import Precision, target_of
from slipstream.simulator.cost.learner_step import Learner
from slipstream.simulator.cost.rollout import Slots
from slipstream.simulator.cost.settings import Setting, load_setting
from slipstream.simulator.fit.ensemble import CalibrationRecord
from slipstream.simulator.fit.observed import CheckRecord, RunCalibration, calibrate_run
from slipstream.simulator.fit.paper import PAPER_SETTING, calibrate_paper
from slipstream.simulator.project.figure_data import ProjectedFigures, projected_figures, running_batches
from slipstream.simulator.project.projection import ProjectedPoint, project
from slipstream.simulator.project.published import PublishedPoint, project_published
from slipstream.simulator.project.scenarios import Scenario

PAPER_SOURCE = "arXiv 2604.26779, measured"
_CPU_SETTING = "cpu-2core"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionRecord:
    """What `project_speedup` hands to the report. All is projected but for fields whose names say measured."""

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


def known_layout(run: RunRecord) -> LayoutRecord:
    """On what a run ran, as the user of a command that needs it must have said in the recipe."""
    rule = "must be of a recipe that names its simulator.model and simulator.hardware"
    require(run.layout is not None, "--run", rule, run.recipe)
    assert run.layout is not None
    return run.layout


def run_setting(layout: LayoutRecord) -> Setting:
    """The layout of a run. What it does not hold (prompts, spread of lengths) is assumed as for its kind of machine."""
    base = load_setting(_CPU_SETTING if target_of(layout.hardware) == "cpu" else PAPER_SETTING)
    return replace(
        base,
        model=layout.model,
        hardware=layout.hardware,
        precision=Precision(layout.precision),
        learner_precision=Precision(layout.learner_precision),
        num_gpus=layout.num_gpus,
        gpus_per_engine=layout.gpus_per_engine,
        max_response_tokens=layout.max_response_tokens,
        slots=Slots.RESPONSE,  # of the loops here; the published runs' make room by the group
    )
