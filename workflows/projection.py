"""Workflow `projection`: projects speculation to any cluster, without a run."""

# Inside a workflow a task returns promises, which flytekit types as a union of all return types of a task.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false

from __future__ import annotations

from tasks.project_request import RequestedProjection, project_request
from workflows.on_cluster import named, workflow


@workflow()
def projection(  # noqa: PLR0913  # one input a line of the launch form
    model: str = "qwen3-235b-a22b",
    hardware: str = "gb200",
    num_gpus: int = 2048,
    num_speculative_tokens: int = 5,
    mean_acceptance_length: float = 4.0,
    max_off_policy_steps: int = 2,
    generation_fraction: float = 0.75,
    mean_response_tokens: float | None = None,
    seed_of_the_day: bool = False,
) -> RequestedProjection:
    """Project bands of the speedup of speculation, from a calibration on published measurements.

    One small pod computes for seconds; nothing is trained, and the cluster that is projected need not exist here.

    Args:
        model: name of a section of configs/sim/models.yaml, such as qwen3-235b-a22b.
        hardware: name of a section of configs/sim/hardware.yaml, such as gb200.
        num_gpus: number of all GPUs, for generation and training.
        num_speculative_tokens: draft tokens an iteration (k).
        mean_acceptance_length: mean tokens an iteration, bonus token included; at most k + 1.
        max_off_policy_steps: policy lag in steps; 0 is synchronous and colocated.
        generation_fraction: fraction of the GPUs that generate, 0 to 1; used with a lag.
        mean_response_tokens: mean length of a response in tokens; default: the layout's.
        seed_of_the_day: seed the samples of the bands by the day, as schedules do; else the seed is 0.

    Returns:
        projection: projection.json.
    """
    projected = project_request(
        model=model,
        hardware=hardware,
        num_gpus=num_gpus,
        num_speculative_tokens=num_speculative_tokens,
        mean_acceptance_length=mean_acceptance_length,
        max_off_policy_steps=max_off_policy_steps,
        generation_fraction=generation_fraction,
        mean_response_tokens=mean_response_tokens,
        seed_of_the_day=seed_of_the_day,
    )
    return named(projected, "project", "project")
