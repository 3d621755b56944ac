"""What a cluster profile asks of its cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubernetes import client as k8s

from slipstream.config import require
from slipstream.kubernetes import pods
from slipstream.kubernetes.preflight.needs import CrdNeed, GpuNodesNeed, Needs, Permission, SecretNeed
from slipstream.kubernetes.profile import ClusterProfile, GpuNodes, PodSize, Scheduler

_GPU, _GPU_QUOTA = "nvidia.com/gpu", "requests.nvidia.com/gpu"
_RAY = CrdNeed(name="rayjobs.ray.io", version="v1", provider="KubeRay")
_DOMAIN = CrdNeed(name="computedomains.resource.nvidia.com", version="v1beta1", provider="NVIDIA's DRA driver")
_QUEUES = {
    Scheduler.KUEUE: CrdNeed(name="localqueues.kueue.x-k8s.io", version="v1beta1", provider="Kueue"),
    Scheduler.VOLCANO: CrdNeed(name="queues.scheduling.volcano.sh", version="v1beta1", provider="Volcano"),
}
_POD_RIGHTS = ("create", "get", "delete")
_UNKNOWN_IMAGE = "slipstream:preflight"  # admission looks at a name, nobody pulls it in a dry run


def needs_of(profile: ClusterProfile, *, namespace: str, image: str | None) -> Needs:
    """Everything that runs of `profile` need in `namespace`.

    Args:
        image: that a pod of the preflight can run, with a shell in it; None starts no pod.
    Raises:
        ConfigError: the profile is of this machine, which has nothing to ask.
    """
    require(not profile.is_local, "--cluster", "must name a cluster of pods", profile.name, "as in gb200")
    assert profile.storage is not None
    gpu = profile.gpu
    return Needs(
        namespace=namespace,
        gpu_nodes=_nodes(profile, gpu) if gpu else None,
        claim=profile.storage.claim,
        mount_path=profile.storage.mount_path,
        claim_template=gpu.channel_claim_template if gpu else None,
        crds=_crds(profile),
        secrets=_secrets(profile),
        service_account=profile.service_account,
        permissions=_permissions(gpu),
        quota=_quota(profile, gpu),
        pods=_pods(profile, image or _UNKNOWN_IMAGE),
        mlflow_uri=profile.tracking.uri if profile.tracking else None,
        group=profile.storage.group,
        probe_image=image,
    )


def _nodes(profile: ClusterProfile, gpu: GpuNodes) -> GpuNodesNeed:
    architecture = {"kubernetes.io/arch": gpu.architecture.value, "nvidia.com/gpu.product": gpu.product}
    return GpuNodesNeed(
        nodes=gpu.nodes,
        labels={**profile.labels, **architecture},
        allocatable={**_amounts(gpu.pod), _GPU: str(gpu.gpus_per_node), **_texts(gpu.rdma_resources)},
        tolerated=frozenset(toleration.key for toleration in profile.tolerations),
        clique_label=gpu.clique_label,
    )


def _crds(profile: ClusterProfile) -> tuple[CrdNeed, ...]:
    gpu = profile.gpu
    if gpu is None:
        return ()
    domain = (_DOMAIN,) if gpu.channel_claim_template else ()
    queue = (_QUEUES[profile.queue.scheduler],) if profile.queue else ()
    return (_RAY, *domain, *queue)


def _secrets(profile: ClusterProfile) -> tuple[SecretNeed, ...]:
    services = [service.secret for service in (profile.tracking, profile.object_store) if service and service.secret]
    token = profile.ray_token_secret
    ray = (SecretNeed(name=token, keys=(pods.RAY_TOKEN_KEY,)),) if token else ()
    return (*(SecretNeed(name=name) for name in services), *ray)


def _permissions(gpu: GpuNodes | None) -> tuple[Permission, ...]:
    rights = tuple(Permission(verb=verb, resource="pods") for verb in _POD_RIGHTS)
    jobs = tuple(Permission(verb=verb, resource="rayjobs", group="ray.io") for verb in _POD_RIGHTS)
    return (*rights, *(jobs if gpu else ()))


def _quota(profile: ClusterProfile, gpu: GpuNodes | None) -> dict[str, str]:
    """Of one task with GPUs, the largest thing that runs at once: all of its workers and its head."""
    if gpu is None or profile.head is None:
        return {"requests.cpu": str(profile.cpu.cpus), "requests.memory": f"{profile.cpu.memory_gib}Gi"}
    return {
        "requests.cpu": str(gpu.nodes * gpu.pod.cpus + profile.head.cpus),
        "requests.memory": f"{gpu.nodes * gpu.pod.memory_gib + profile.head.memory_gib}Gi",
        _GPU_QUOTA: str(gpu.nodes * gpu.gpus_per_node),
    }


def _amounts(size: PodSize) -> dict[str, str]:
    return {
        "cpu": str(size.cpus),
        "memory": f"{size.memory_gib}Gi",
        "ephemeral-storage": f"{size.ephemeral_storage_gib}Gi",
    }


def _texts(counts: Mapping[str, int]) -> dict[str, str]:
    return {name: str(count) for name, count in counts.items()}


def _pods(profile: ClusterProfile, image: str) -> dict[str, dict[str, Any]]:
    """A pod of each kind, as Flyte and KubeRay will make them."""
    manifests = {"cpu": _manifest("cpu", _plain(pods.cpu_pod(profile)), image)}
    if profile.gpu is not None:
        for role, overlay in (("head", pods.head_overlay(profile)), ("worker", pods.worker_overlay(profile))):
            spec = laid_over(_plain(pods.ray_base(profile)), _plain(overlay))
            manifests[role] = _manifest("ray", spec, image)
    return manifests


def _manifest(component: str, spec: dict[str, Any], image: str) -> dict[str, Any]:
    metadata = {"generateName": "slipstream-preflight-", "labels": pods.labels(component)}
    containers = [{**container, "image": image} for container in spec["containers"]]
    whole = {**spec, "containers": containers, "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole}


def _plain(spec: k8s.V1PodSpec) -> dict[str, Any]:
    plain: Any = k8s.ApiClient(k8s.Configuration()).sanitize_for_serialization(spec)
    return plain


def laid_over(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """`overlay` over `base` as Flyte's Ray plugin does it: maps merge, lists are appended, the one container merges."""
    (below,), (above,) = base["containers"], overlay["containers"]
    return {**_merged(base, overlay), "containers": [_merged(below, above)]}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[name] = _merged(old, value)
        else:
            merged[name] = [*old, *value] if isinstance(old, list) and isinstance(value, list) else value
    return merged
