"""Task that projects the speedup for a user's request, without a run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flytekit import current_context, task
from flytekit.types.file import FlyteFile

from slipstream.simulator.projection import ProjectionRequest, write_request
from slipstream.study.variants import day_seed
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, on_cpus


class RequestedProjection(NamedTuple):
    """Output of the projection: projection.json."""

    projection: FlyteFile


@task(**on_cpus())
@recoverable(CHECKING)
def project_request(  # noqa: PLR0913  # one input a line of the launch form
    model: str,
    hardware: str,
    num_gpus: int,
    num_speculative_tokens: int,
    mean_acceptance_length: float,
    max_off_policy_steps: int,
    generation_fraction: float,
    seed_of_the_day: bool,
    mean_response_tokens: float | None = None,
) -> RequestedProjection:
    """Project speedups with bands in projection.json, on an ideal stack and calibrated on published measurements."""
    request = ProjectionRequest(
        model=model,
        hardware=hardware,
        num_gpus=num_gpus,
        k=num_speculative_tokens,
        acceptance_length=mean_acceptance_length,
        lag=max_off_policy_steps,
        generation_fraction=generation_fraction,
        mean_tokens=mean_response_tokens or 0.0,
    )
    seed = day_seed(datetime.now(UTC)) if seed_of_the_day else 0
    path = write_request(request, Path(current_context().working_directory), seed=seed)
    return RequestedProjection(projection=FlyteFile(str(path)))
