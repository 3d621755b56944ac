"""What is projected from a calibration on the paper's measurements: its own points, and what a user asks for."""

from __future__ import annotations

from pathlib import Path

from slipstream.records.files import write_record
from slipstream.simulator.fit.ensemble import Ensemble
from slipstream.simulator.fit.paper import calibrate_paper, paper_learner, read_simulator_reference
from slipstream.simulator.project.projection import ProjectedPoint, best_of_map, project, project_ideal
from slipstream.simulator.project.records import PublishedPoint, RequestedProjection
from slipstream.simulator.project.scenarios import ProjectionRequest, Scenario, assumed_layouts, published_scenario


def project_published(ensemble: Ensemble) -> list[PublishedPoint]:
    """The points that the paper's closed simulator projects, from a calibration on the paper's measurements."""
    points = []
    for reference in read_simulator_reference().projected:
        scenario = published_scenario(
            k=reference.k or 0,
            acceptance_length=reference.acceptance_length or 1.0,
            num_gpus=reference.num_gpus,
            lag=reference.lag,
        )
        if reference.k is None:
            scenario = best_of_map(scenario, ensemble.best)
        points.append(
            PublishedPoint(
                published_rollout_speedup=reference.rollout_speedup,
                published_step_speedup=reference.step_speedup,
                ideal=_ideal(scenario),
                calibrated=_calibrated(scenario, ensemble),
            )
        )
    return points


def project_request(request: ProjectionRequest, *, seed: int = 0) -> RequestedProjection:
    """What an ideal stack would give, and what the paper's measurements let expect.

    Args:
        seed: of the draws behind the bands.
    """
    scenario = request.scenario()
    return RequestedProjection(
        ideal=_ideal(scenario),
        calibrated=_calibrated(scenario, calibrate_paper(), seed=seed),
        assumptions=tuple(
            f"{name}: {source}" for name, source in scenario.setting.sources.items() if source.startswith("assumed")
        ),
    )


def write_request(request: ProjectionRequest, directory: Path, *, seed: int = 0) -> Path:
    """Project `request` from the paper's measurements, write projection.json into `directory`; its path."""
    return write_record(project_request(request, seed=seed), directory / "projection.json")


def _ideal(scenario: Scenario) -> ProjectedPoint:
    return project_ideal(scenario, paper_learner(), layouts=assumed_layouts(scenario)).point


def _calibrated(scenario: Scenario, ensemble: Ensemble, *, seed: int = 0) -> ProjectedPoint:
    return project(scenario, ensemble, paper_learner(), layouts=assumed_layouts(scenario), seed=seed).point
