"""What tasks share: image, pods, time-outs and retries, by the cluster that they are registered for.

`SLIPSTREAM_CLUSTER` names the profile in configs/clusters/; without it tasks run where the workflow is started, as
`slipstream demo` runs them. The same variable is set in every pod, so a task is there what it was when registered.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from flytekit import FlyteContextManager, Resources

from slipstream.kubernetes.profile import active_profile

CLUSTER = active_profile()

CPU_IMAGE = "{{.image.cpu.fqn}}:{{.image.cpu.version}}"
GPU_IMAGE = "{{.image.gpu.fqn}}:{{.image.gpu.version}}"
"""Built from the Dockerfile at the root and from images/gpu.Dockerfile; named at registration by
`--image cpu=… --image gpu=…`, which fails where one is missing."""

RETRIES = 2
"""A retried task finds its checkpoints and its MLflow run by execution and node."""

# No task is cached by Flyte: data, policy and draft are kept by slipstream.stages.store, under the root that every pod
# sees. Its keys hold the sections of the recipe that matter, what the inputs contain, and versions; Flyte's would hold
# the address of recipe.yaml, new in every execution. A hit there could also outlive the weights that it stands for, and
# would leave the execution without their MLflow runs. What it costs: a task that finds its output in the store still
# waits for its pod.

CHECKING = timedelta(minutes=30)  # reads records, computes little
PREPARING = timedelta(hours=12)  # downloads a model or a data set, filters it
MEASURING = timedelta(hours=24)  # generates, trains a draft
TRAINING = timedelta(days=14)  # the arms of GRPO


def on_cpus(timeout: timedelta, *, retries: int = RETRIES) -> dict[str, Any]:
    """Arguments of `task` for one that needs no GPU."""
    shared = {"container_image": CPU_IMAGE, "timeout": timeout, "retries": retries}
    if CLUSTER.is_local:
        return {**shared, "requests": Resources(cpu=str(CLUSTER.cpu.cpus), mem=f"{CLUSTER.cpu.memory_gib}Gi")}
    from tasks.pods import cpu_template

    # No requests beside a template: flytekit would replace the template's, and GPUs and claims with them.
    return {**shared, "pod_template": cpu_template(CLUSTER)}


def on_cpus_with_token(timeout: timedelta) -> dict[str, Any]:
    """Arguments of `task` for one that asks the Kubernetes API, under the account of a preflight."""
    if CLUSTER.is_local:
        return on_cpus(timeout)
    from tasks.pods import preflight_template

    return {**on_cpus(timeout), "pod_template": preflight_template(CLUSTER)}


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
