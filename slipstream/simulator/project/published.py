"""What is projected from a calibration on the paper's measurements: its own points, and what a user asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.records.files import write_record
from slipstream.simulator.fit.paper import calibrate_paper, paper_learner, read_simulator_reference
from slipstream.simulator.project.projection import ProjectedPoint, best_of_map, project, project_ideal
from slipstream.simulator.project.scenarios import PUBLISHED_MODEL, ProjectionRequest, Scenario, assumed_layouts


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


def project_published() -> list[PublishedPoint]:
    """The points that the paper's closed simulator projects, from a calibration on the paper's measurements."""
    points = []
    for reference in read_simulator_reference().projected:
        scenario = ProjectionRequest(
            model=PUBLISHED_MODEL,
            num_gpus=reference.num_gpus,
            k=reference.k or 0,
            acceptance_length=reference.acceptance_length or 1.0,
            lag=reference.lag,
        ).scenario()
        if reference.k is None:
            scenario = best_of_map(scenario, calibrate_paper().best)
        points.append(
            PublishedPoint(
                published_rollout_speedup=reference.rollout_speedup,
                published_step_speedup=reference.step_speedup,
                **_projected(scenario),
            )
        )
    return points


def project_request(request: ProjectionRequest, *, seed: int = 0) -> RequestedProjection:
    """What an ideal stack would give, and what the paper's measurements let expect.

    Args:
        seed: of the draws behind the bands.
    """
    scenario = request.scenario()
    sources = scenario.setting.sources.items()
    assumptions = tuple(f"{name}: {source}" for name, source in sources if source.startswith("assumed"))
    return RequestedProjection(assumptions=assumptions, **_projected(scenario, seed))


def write_request(request: ProjectionRequest, directory: Path, *, seed: int = 0) -> Path:
    """Project `request` from the paper's measurements, write projection.json into `directory`; its path."""
    return write_record(project_request(request, seed=seed), directory / "projection.json")


def _projected(scenario: Scenario, seed: int = 0) -> dict[str, ProjectedPoint]:
    learner, layouts = paper_learner(), assumed_layouts(scenario)
    calibrated = project(scenario, calibrate_paper(), learner, layouts=layouts, seed=seed)
    return {"ideal": project_ideal(scenario, learner, layouts=layouts).point, "calibrated": calibrated.point}
