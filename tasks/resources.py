"""Images, pods, time-outs and retries of the tasks, by the cluster profile of the registration.

`SLIPSTREAM_CLUSTER` names the profile in configs/clusters/; without the variable, tasks run in the process that starts
the workflow, as in `slipstream run`. Every pod sets the variable, so that a task is declared alike in a pod and at
registration.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from flytekit import FlyteContextManager, Resources

from slipstream.kubernetes.profile import active_profile, shared_root

CLUSTER = active_profile()

CPU_IMAGE = "{{.image.cpu.fqn}}:{{.image.cpu.version}}"
GPU_IMAGE = "{{.image.gpu.fqn}}:{{.image.gpu.version}}"
"""Images of Dockerfile and images/gpu.Dockerfile; `--image cpu=… --image gpu=…` names them at registration, which fails
where one is missing."""

RETRIES = 2
"""Number of retries; a retried task finds its checkpoints and its MLflow run by execution and node."""

# Flyte's cache is off: slipstream.stages.store keeps data, policy and draft under the root that every pod mounts. Keys
# of the store hold the relevant sections of the recipe, contents of inputs, and versions; Flyte's key would hold the
# address of recipe.yaml, which is new in every execution. A hit in Flyte's cache could also outlive the weights, and
# would leave the execution without MLflow runs. The price: a task that finds its output in the store still waits for a
# pod.

# Deadlines of an attempt, from the start of its work: `recoverable` ends it. They are guesses.
CHECKING = timedelta(minutes=30)  # a task that reads records and computes little
PREPARING = timedelta(hours=12)  # a task that downloads and filters a model or a data set
MEASURING = timedelta(hours=24)  # a task that generates or trains a draft
TRAINING = timedelta(days=14)  # a task that trains arms of GRPO

WAITING = timedelta(days=90)
"""Flyte's time-out of every task. It counts the wait for nodes, and twice its value bounds all attempts together, so it
exceeds every deadline times the attempts. Source: `FinalTransition` in flytepropeller's nodes/task/handler.go, and
`ActiveDeadline` in its compiler/transformers/k8s/node.go, 1.16."""


def on_cpus(*, retries: int = RETRIES, calls_api: bool = False) -> dict[str, Any]:
    """Return the arguments of `task` for a task without GPUs.

    Args:
        calls_api: in a pod the task calls the Kubernetes API, under the preflight's account.
    """
    shared = {"container_image": CPU_IMAGE, "timeout": WAITING, "retries": retries}
    if CLUSTER.is_local:
        return {**shared, "requests": Resources(cpu=str(CLUSTER.cpu.cpus), mem=f"{CLUSTER.cpu.memory_gib}Gi")}
    from tasks.pods import cpu_template

    # Requests beside a template would replace the resources of the template, GPUs and claims included.
    return {**shared, "pod_template": cpu_template(CLUSTER, calls_api=calls_api)}


def on_gpus(*, has_deck: bool = True) -> dict[str, Any]:
    """Return the arguments of `task` for a task with engines or learner, on all GPU nodes if the cluster has any.

    Args:
        has_deck: its deck shows how far it is. In an array a task has none: flytekit makes the array's task anew in
            each pod, without its deck (`ArrayNodeMapTaskResolver`).
    """
    shown = {"enable_deck": has_deck, "deck_fields": ()}
    if CLUSTER.gpu is None:
        return {**on_cpus(), **shown}
    from tasks.pods import ray_job, ray_template

    return {
        **shown,
        "container_image": GPU_IMAGE,
        "timeout": WAITING,
        "retries": RETRIES,
        "pod_template": ray_template(CLUSTER),
        "task_config": ray_job(CLUSTER),
    }


def runs_locally() -> bool:
    """Return True if this task runs in the process that started the workflow."""
    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.is_local_execution()


def root_of(run_root: str) -> Path:
    """Return the run root of a launch as a directory that every task of the execution sees, else refuse it."""
    return shared_root(run_root, CLUSTER, is_local=runs_locally())
