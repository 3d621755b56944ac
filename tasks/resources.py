"""What tasks share: image, pods, time-outs, retries and cache, by the cluster that they are registered for.

`SLIPSTREAM_CLUSTER` names the profile in configs/clusters/; without it tasks run where the workflow is started, as
`slipstream demo` runs them. The same variable is set in every pod, so a task is there what it was when registered.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from flytekit import Cache, FlyteContextManager, Resources

from slipstream.cluster.profile import active_profile

CLUSTER = active_profile()

CPU_IMAGE = "{{.image.cpu.fqn}}:{{.image.cpu.version}}"
GPU_IMAGE = "{{.image.gpu.fqn}}:{{.image.gpu.version}}"
"""Built from the Dockerfile at the root and from images/gpu.Dockerfile; named at registration by
`--image cpu=… --image gpu=…`, which fails where one is missing."""

RETRIES = 2
"""A retried task finds its checkpoints and its MLflow run by execution and node."""

CACHE = Cache(version="1", ignored_inputs=("context",))
"""For tasks whose inputs determine their output. Measured tasks are not cached: a timing belongs to its own run."""

CHECKING = timedelta(minutes=30)  # reads records, computes little
PREPARING = timedelta(hours=12)  # downloads a model or a data set, filters it
MEASURING = timedelta(hours=24)  # generates, trains a draft
TRAINING = timedelta(days=7)  # an arm of GRPO


def on_cpus(timeout: timedelta, *, retries: int = RETRIES) -> dict[str, Any]:
    """Arguments of `task` for one that needs no GPU."""
    shared = {"container_image": CPU_IMAGE, "timeout": timeout, "retries": retries}
    if CLUSTER.is_local:
        return {**shared, "requests": Resources(cpu=str(CLUSTER.cpu.cpus), mem=f"{CLUSTER.cpu.memory_gib}Gi")}
    from tasks.pods import cpu_template

    # No requests beside a template: flytekit would replace the template's, and GPUs and claims with them.
    return {**shared, "pod_template": cpu_template(CLUSTER)}


def on_gpus(timeout: timedelta) -> dict[str, Any]:
    """Arguments of `task` for one that runs engines or the learner: over all GPU nodes, where the cluster has any."""
    if CLUSTER.gpu is None:
        return on_cpus(timeout)
    from tasks.pods import ray_job, ray_template

    return {
        "container_image": GPU_IMAGE,
        "timeout": timeout,
        "retries": RETRIES,
        "pod_template": ray_template(CLUSTER),
        "task_config": ray_job(CLUSTER),
    }


def runs_locally() -> bool:
    """Whether this task runs in the process that the workflow was started in."""
    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.is_local_execution()
