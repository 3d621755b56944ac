"""Pod templates of the tasks, and the Ray job of a task with GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flytekit import PodTemplate

from slipstream.kubernetes import pods
from slipstream.kubernetes.profile import ClusterProfile

if TYPE_CHECKING:
    from flytekitplugins.ray import RayJobConfig

_CPU, _RAY = "cpu", "ray"
# The job is submitted through the dashboard's port, so the dashboard listens on the pod's address, with a token, behind
# the network policy of deploy/, and without an ingress. Only the task's own process runs on the head.
_HEAD_PARAMS = {"num-cpus": "0", "num-gpus": "0", "include-dashboard": "true", "dashboard-host": "0.0.0.0"}


def cpu_template(profile: ClusterProfile, *, calls_api: bool) -> PodTemplate:
    """Build the pod template of a task without GPUs; the preflight alone calls the cluster's API."""
    spec = pods.preflight_pod(profile) if calls_api else pods.cpu_pod(profile)
    return PodTemplate(pod_spec=spec, primary_container_name=pods.PRIMARY, labels=pods.labels(_CPU), annotations={})


def ray_template(profile: ClusterProfile) -> PodTemplate:
    """Build the base template of a Ray job's pods; its labels become those of the job, which queues read."""
    return PodTemplate(
        pod_spec=pods.ray_base(profile),
        primary_container_name=pods.PRIMARY,
        labels={**pods.labels(_RAY), **pods.queue_labels(profile)},
        annotations={},
    )


def ray_job(profile: ClusterProfile) -> RayJobConfig:
    """Describe a Ray cluster over all GPU nodes of the profile, which is deleted when its task ends.

    The config has pod templates and never requests or limits, because with either the plugin silently drops the
    template. The plugin is imported here, so that Ray is not imported before a task runs in a pod.
    """
    from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig

    assert profile.gpu is not None
    return RayJobConfig(
        head_node_config=HeadNodeConfig(
            ray_start_params=dict(_HEAD_PARAMS),
            pod_template=PodTemplate(
                pod_spec=pods.head_overlay(profile), primary_container_name=pods.RAY_HEAD, labels={}, annotations={}
            ),
        ),
        worker_node_config=[
            WorkerNodeConfig(
                group_name="gpu",
                replicas=profile.gpu.nodes,
                min_replicas=profile.gpu.nodes,
                max_replicas=profile.gpu.nodes,
                ray_start_params={"num-gpus": str(profile.gpu.gpus_per_node)},
                pod_template=PodTemplate(
                    pod_spec=pods.worker_overlay(profile),
                    primary_container_name=pods.RAY_WORKER,
                    labels={},
                    annotations=pods.worker_annotations(profile),
                ),
            )
        ],
        shutdown_after_job_finishes=True,
        ttl_seconds_after_finished=0,  # a finished job holds no GPUs
    )
