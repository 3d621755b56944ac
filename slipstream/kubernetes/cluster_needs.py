"""What a cluster profile asks of its cluster, in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes import client as k8s

from slipstream.config import require
from slipstream.kubernetes import pods
from slipstream.kubernetes.profile import ClusterProfile, Scheduler


@dataclass(frozen=True, kw_only=True)
class GpuNodesNeed:
    """Nodes that carry one worker pod each; with a clique label all in one NVLink domain."""

    nodes: int
    labels: Mapping[str, str]  # product and architecture among them
    allocatable: Mapping[str, str]  # Kubernetes quantities a node must have, as in {"nvidia.com/gpu": "4"}
    tolerated: frozenset[str] = frozenset()  # keys of taints that the pods tolerate
    clique_label: str | None = None

    def __post_init__(self) -> None:
        require(self.nodes >= 1, "nodes", "must be >= 1", self.nodes)


@dataclass(frozen=True, kw_only=True)
class CrdNeed:
    """A custom resource and the version of it that is used."""

    name: str  # as in rayjobs.ray.io
    version: str
    provider: str  # what installs it, for the fix


@dataclass(frozen=True, kw_only=True)
class SecretNeed:
    """A secret; without `keys` any will do."""

    name: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Permission:
    """What the caller must be allowed to do in the namespace; the empty group is the core API."""

    verb: str
    resource: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Everything that a preflight asks about. What is None or empty is not asked."""

    namespace: str
    gpu_nodes: GpuNodesNeed | None = None
    claim: str | None = None  # of the shared volume
    mount_path: str = "/mnt/slipstream"
    claim_template: str | None = None  # that the ComputeDomain makes
    crds: tuple[CrdNeed, ...] = ()
    secrets: tuple[SecretNeed, ...] = ()
    service_account: str | None = None
    permissions: tuple[Permission, ...] = ()
    quota: Mapping[str, str] = field(default_factory=dict)  # all pods of a run together, as in {"requests.cpu": "1040"}
    pods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # manifests by role, for the dry run
    mlflow_uri: str | None = None
    own_root: Path | None = None  # that this process, in a pod, tries to write to instead of a pod of its own
    user: int = 1000
    group: int = 1000
    probe_image: str | None = None  # None: no pod is started, and the root stays unchecked
    probe_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        require(self.namespace != "", "namespace", "must name a namespace", self.namespace)
        require(self.probe_timeout_s > 0, "probe_timeout_s", "must be > 0", self.probe_timeout_s)


_GPU = "nvidia.com/gpu"
_RAY = CrdNeed(name="rayjobs.ray.io", version="v1", provider="KubeRay")
_DOMAIN = CrdNeed(name="computedomains.resource.nvidia.com", version="v1beta1", provider="NVIDIA's DRA driver")
_QUEUES = {
    Scheduler.KUEUE: CrdNeed(name="localqueues.kueue.x-k8s.io", version="v1beta1", provider="Kueue"),
    Scheduler.VOLCANO: CrdNeed(name="queues.scheduling.volcano.sh", version="v1beta1", provider="Volcano"),
}
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
    services = [service.secret for service in (profile.tracking, profile.object_store) if service and service.secret]
    token = profile.ray_token_secret
    manifests = {"cpu": _manifest("cpu", _plain(pods.cpu_pod(profile)), image)}
    resources = [("pods", ""), *([("rayjobs", "ray.io")] if profile.gpu else [])]
    return Needs(
        namespace=namespace,
        claim=profile.storage.claim,
        mount_path=profile.storage.mount_path,
        secrets=(
            *(SecretNeed(name=name) for name in services),
            *([SecretNeed(name=token, keys=(pods.RAY_TOKEN_KEY,))] if token else []),
        ),
        service_account=profile.service_account,
        permissions=tuple(
            Permission(verb=verb, resource=resource, group=group)
            for resource, group in resources
            for verb in ("create", "get", "delete")
        ),
        mlflow_uri=profile.tracking.uri if profile.tracking else None,
        group=profile.storage.group,
        probe_image=image,
        **_of_gpus(profile, manifests, image),
    )


def _of_gpus(profile: ClusterProfile, manifests: dict[str, Any], image: str | None) -> dict[str, Any]:
    """Nodes, custom resources, manifests and the quota of one task, the largest thing that runs at once."""
    gpu, head = profile.gpu, profile.head
    if gpu is None or head is None:
        quota = {"requests.cpu": str(profile.cpu.cpus), "requests.memory": f"{profile.cpu.memory_gib}Gi"}
        return {"quota": quota, "pods": manifests}
    for role, overlay in (("head", pods.head_overlay(profile)), ("worker", pods.worker_overlay(profile))):
        manifests[role] = _manifest("ray", laid_over(_plain(pods.ray_base(profile)), _plain(overlay)), image)
    counts = {name: str(count) for name, count in {_GPU: gpu.gpus_per_node, **gpu.rdma_resources}.items()}
    domain = (_DOMAIN,) if gpu.channel_claim_template else ()
    queue = (_QUEUES[profile.queue.scheduler],) if profile.queue else ()
    return {
        "gpu_nodes": GpuNodesNeed(
            nodes=gpu.nodes,
            labels={
                **profile.labels,
                "kubernetes.io/arch": gpu.architecture.value,
                "nvidia.com/gpu.product": gpu.product,
            },
            allocatable={**pods.amounts(gpu.pod), **counts},
            tolerated=frozenset(toleration.key for toleration in profile.tolerations),
            clique_label=gpu.clique_label,
        ),
        "claim_template": gpu.channel_claim_template,
        "crds": (_RAY, *domain, *queue),
        "pods": manifests,
        "quota": {
            "requests.cpu": str(gpu.nodes * gpu.pod.cpus + head.cpus),
            "requests.memory": f"{gpu.nodes * gpu.pod.memory_gib + head.memory_gib}Gi",
            f"requests.{_GPU}": str(gpu.nodes * gpu.gpus_per_node),
        },
    }


def _manifest(component: str, spec: dict[str, Any], image: str | None) -> dict[str, Any]:
    """A pod of a kind, as Flyte and KubeRay will make it."""
    metadata = {"generateName": "slipstream-preflight-", "labels": pods.labels(component)}
    containers = [{**container, "image": image or _UNKNOWN_IMAGE} for container in spec["containers"]]
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
