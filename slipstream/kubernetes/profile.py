"""Cluster profiles: a cluster's description in `configs/clusters/<name>.yaml`, read when tasks are registered.

A recipe defines the computation, and a profile defines the nodes and pods. The same recipe runs on every cluster whose
nodes it fits. A launch that does not fit is refused within seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from slipstream.catalog import CONFIGS
from slipstream.config import (
    Checked,
    ConfigError,
    Fix,
    Int,
    NonNegativeInt,
    PositiveInt,
    Switch,
    from_mapping,
    read_mapping,
    require,
    rule,
)

CLUSTERS = CONFIGS / "clusters"
NODE_VARIABLE = "SLIPSTREAM_NODE"
"""Environment variable with the node of a pod, set from `spec.nodeName`, as a host name inside a pod is the pod's."""

CLUSTER_VARIABLE = "SLIPSTREAM_CLUSTER"
"""Environment variable with the name of the profile, at registration and in every pod."""
LOCAL = "local"

_ADDRESS = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # of a Kubernetes object: RFC 1123 subdomain
_NAME_RULE = "must be a name of Kubernetes: lower-case letters, digits, '-' and '.'"
Name = Annotated[str, rule(_NAME_RULE, lambda name: _NAME.fullmatch(name) is not None)]
Addresses = Annotated[
    tuple[str, ...],
    rule("must hold e-mail addresses", lambda addresses: all(map(_ADDRESS.fullmatch, addresses))),
    Fix("Slack shows a channel's"),
]
MountPath = Annotated[str, rule("must be an absolute path below /", lambda path: path.startswith("/") and path != "/")]
Address = Annotated[str, rule("must be http:// or https://", lambda uri: uri.startswith(("http://", "https://")))]


class Architecture(StrEnum):
    """Architecture of the nodes' processors, as the label `kubernetes.io/arch` spells it."""

    ARM64 = "arm64"
    AMD64 = "amd64"


class Scheduler(StrEnum):
    """Scheduler that starts all pods of a Ray cluster together or none."""

    KUEUE = "kueue"
    VOLCANO = "volcano"


class Toleration(Checked, path="tolerations"):
    """A taint of the nodes that pods may ignore."""

    key: str
    """Key of the taint."""
    value: str | None = None
    """Value of the taint; null tolerates any."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"
    """Effect of the taint."""

    def covers(self, taint: Any) -> bool:
        """Return True if pods may ignore this taint, a V1Taint."""
        has_value = self.value is None or self.value == (taint.value or "")
        return has_value and (self.key, self.effect) == (taint.key, taint.effect)


class PodSize(Checked):
    """Resources of one pod; requests and limits are the same."""

    cpus: PositiveInt
    """Cores."""
    memory_gib: PositiveInt
    """Memory, in GiB."""
    ephemeral_storage_gib: PositiveInt = 20
    """Disk of the pod's own, in GiB: downloads, /tmp, Ray's logs."""
    shared_memory_gib: NonNegativeInt = 0
    """Part of `memory_gib` that is /dev/shm, in GiB; 0 is Kubernetes' 64 MiB."""

    def _check(self) -> None:
        rule = f"must be < memory_gib {self.memory_gib}, of which it is a part"
        self._require(self.shared_memory_gib < self.memory_gib, "shared_memory_gib", rule)


class GpuNodes(Checked, path="gpu"):
    """The nodes with GPUs that each task with GPUs takes, all of them."""

    nodes: PositiveInt
    """Nodes with GPUs."""
    gpus_per_node: Annotated[PositiveInt, Fix("leave gpu out")]
    """GPUs of a node."""
    product: str
    """Value of the label nvidia.com/gpu.product, as the GPU operator's feature discovery writes it."""
    architecture: Architecture
    """Architecture of the nodes' processors."""
    pod: PodSize
    """Size of the one pod on each node."""
    clique_label: str | None = None
    """Label whose value is the same for nodes that share NVLink; null takes any nodes."""
    channel_claim_template: Name | None = None
    """Claim template that the ComputeDomain makes: deploy/gb200/compute_domain.yaml."""
    takes_cpu_pods: Switch = False
    """Pods of tasks without GPUs may run on these nodes: for a cluster that has no others."""
    rdma_resources: dict[str, Int] = field(default_factory=dict)
    """Extended resources for RDMA, and how many a pod takes of each."""

    def _check(self) -> None:
        fix = "weights, NCCL and Ray's object store lie in /dev/shm, and a pod has 64 MiB there by itself"
        self._require(self.pod.shared_memory_gib > 0, "pod.shared_memory_gib", "must be >= 1", fix)
        rule = "must read vendor/name: count >= 1"
        for name, count in self.rdma_resources.items():
            require("/" in name and count >= 1, "gpu.rdma_resources", rule, {name: count}, "as in rdma/ib: 4")


class SharedStorage(Checked, path="storage"):
    """A volume that every pod mounts: checkpoints, the store of drafts and policies, the tracking spool."""

    claim: Name
    """Name of the volume's claim."""
    mount_path: MountPath
    """Path at which pods mount the volume."""
    group: NonNegativeInt = 1000
    """Group of the files: fsGroup of every pod."""


class Queue(Checked, path="queue"):
    """Queue in which Ray clusters wait until all of their pods fit."""

    scheduler: Scheduler
    """Scheduler that owns the queue."""
    name: Name
    """Name of the queue."""
    knows_topology: Switch = False
    """Topology-aware scheduling of Kueue has `gpu.clique_label` as a level."""

    def _check(self) -> None:
        is_kueue = self.scheduler is Scheduler.KUEUE
        require(is_kueue or not self.knows_topology, "queue.knows_topology", "must be false with volcano", True)


_STORES = ("s3://", "gs://", "abfs://")


class TrackingService(Checked, path="tracking"):
    """An MLflow server inside or outside the cluster."""

    uri: Annotated[Address, Fix("pods share no SQLite file")]
    """Address of the server."""
    console: Address | None = None
    """Address of the server as users type it, for links; null takes `uri`."""
    secret: Name | None = None
    """Secret whose keys become variables: MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD."""


class ObjectStore(Checked, path="object_store"):
    """Store in which Flyte keeps what tasks hand on."""

    prefix: Annotated[
        str, rule(f"must start with one of {', '.join(_STORES)}", lambda prefix: prefix.startswith(_STORES))
    ]
    """Address below which Flyte writes."""
    secret: Name | None = None
    """Secret whose keys become variables, as FLYTE_AWS_ACCESS_KEY_ID; null leaves the pods' own identity."""


class FlyteServer(Checked, path="flyte"):
    """Flyte's own servers."""

    console: Address | None = None
    """Address of the console as users type it, as in https://flyte.example.org/console; null leaves runs without links
    to their executions."""
    endpoint: Address | None = None
    """Address of flyteadmin's HTTP port, for `slipstream reconcile`, `slipstream smoke` and start_run."""


class Schedules(Checked, path="schedules"):
    """Recurring launch plans: their activation, and the addresses that Flyte notifies of their end."""

    activate: Switch = False
    """Activate the plans at registration; else `flytectl update launchplan NAME --activate` starts each."""
    slack: Addresses = ()
    """E-mail addresses of Slack channels, to which Flyte's notifier writes."""
    email: Addresses = ()
    """E-mail addresses, to which Flyte's notifier writes."""


class ClusterProfile(Checked):
    """One cluster. Without `storage` it is the machine that the workflow is started on, and nothing else."""

    name: str
    """Name of the profile, as its file's."""
    run_root: str
    """Directory of runs unless a launch names another; on a cluster it lies below `storage.mount_path`."""
    cpu: PodSize
    """Size of pods of tasks without GPUs."""
    head: PodSize | None = None
    """Size of Ray's head, which runs the task's own process; required with `gpu`."""
    gpu: GpuNodes | None = None
    """Nodes with GPUs; null has none."""
    recipe_8b: str = "qwen3_8b"
    """Recipe that the launch plans train-8b and rl-*-8b start: one that fits the nodes."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels that the nodes of every pod must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that pods may ignore."""
    storage: SharedStorage | None = None
    """Volume that every pod mounts; null runs on the machine that starts the workflow."""
    queue: Queue | None = None
    """Queue of Ray clusters; null starts their pods at once."""
    tracking: TrackingService | None = None
    """MLflow server; null takes SQLite under the run root."""
    object_store: ObjectStore | None = None
    """Store of Flyte."""
    flyte: FlyteServer = field(default_factory=FlyteServer)
    """Servers of Flyte."""
    service_account: Name | None = None
    """Service account of every pod."""
    ray_token_secret: Name | None = None
    """Secret with the key auth_token: whoever has it may run code in a Ray cluster of ours."""
    config_map: Name | None = None
    """ConfigMap with this file, mounted in every pod in place of the image's, so that an edit needs no new image."""
    parallel_parts: PositiveInt = 1
    """Parts of an ablation that run at once; each takes all GPU nodes, so more need more than these."""
    schedules: Schedules = field(default_factory=Schedules)
    """Recurring launch plans."""

    def _check(self) -> None:
        if self.storage is None:
            for name in ("gpu", "head", "queue", "tracking", "object_store", "service_account", "ray_token_secret"):
                value = getattr(self, name)
                require(value is None, name, "must be left out without storage", value, "pods need a shared volume")
            return
        root, mount = PurePosixPath(self.run_root), PurePosixPath(self.storage.mount_path)
        rule = f"must lie below storage.mount_path {mount}"
        self._require(root.is_relative_to(mount), "run_root", rule, "pods share nothing else")
        if self.gpu is not None:
            require(self.head is not None, "head", "is required with gpu", None, "Ray's head runs the task's process")
            fix = "name a secret with the key auth_token: without it anybody in the network may run code"
            require(self.ray_token_secret is not None, "ray_token_secret", "is required with gpu", None, fix)

    @property
    def is_local(self) -> bool:
        """True if tasks run in this process rather than in pods."""
        return self.storage is None


def read_profile(name: str) -> ClusterProfile:
    """Read the profile `configs/clusters/<name>.yaml`, or the file `name`, which an error names."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CLUSTERS / f"{name}.yaml"
    known = ", ".join(sorted(p.stem for p in CLUSTERS.glob("*.yaml")))
    require(os.path.isfile(path), CLUSTER_VARIABLE, "must name a cluster profile", name, f"known profiles: {known}")
    values = read_mapping(path, "cluster profile")
    try:
        profile = from_mapping(ClusterProfile, values)
    except ConfigError as error:
        raise ConfigError(f"cluster profile {path}: {error}") from error
    rule = f"must be the file's name {path.stem!r}"
    require(profile.name == path.stem, f"cluster profile {path}: name", rule, profile.name)
    return profile


def active_profile(environment: Mapping[str, str] = os.environ) -> ClusterProfile:
    """Read the profile that SLIPSTREAM_CLUSTER names, by default `local`."""
    return read_profile(environment.get(CLUSTER_VARIABLE) or LOCAL)


def shared_root(run_root: str, profile: ClusterProfile, *, is_local: bool) -> Path:
    """Return `run_root` as a directory that every task of the execution sees.

    A URI, which would become a directory on the pod's own disk, is refused. So is in pods a path that is relative or
    outside the shared volume, which would be lost with the pod. With `is_local` all tasks run in this process.
    """
    require("://" not in run_root, "run_root", "must be a path, not a URI", run_root, f"as in {profile.run_root}")
    if is_local:
        return Path(run_root)
    path = PurePosixPath(run_root)
    require(path.is_absolute(), "run_root", "must be absolute in pods", run_root, f"as in {profile.run_root}")
    if profile.storage is not None:
        mount = profile.storage.mount_path
        rule = f"must lie below {mount}, the shared volume of cluster {profile.name}"
        inside = path.is_relative_to(mount) and ".." not in path.parts
        require(inside, "run_root", rule, run_root, f"as in {profile.run_root}")
    return Path(run_root)


def require_fits(profile: ClusterProfile, *, nodes: int, gpus_per_node: int, trains_from_scratch: bool) -> None:
    """Refuse a recipe whose placement the cluster's nodes cannot hold."""
    where = f"cluster {profile.name}"
    if profile.gpu is None:
        fix = "register for a cluster with GPUs, as in make register CLUSTER=gb200"
        require(gpus_per_node == 0, "placement.gpus_per_node", f"must be 0 on {where}", gpus_per_node, fix)
        return
    offered = profile.gpu
    is_offered = 1 <= gpus_per_node <= offered.gpus_per_node
    fix = "register for a cluster without GPUs, as in make register CLUSTER=cpu" if gpus_per_node == 0 else ""
    rule = f"must be 1 to {offered.gpus_per_node} on {where}"
    require(is_offered, "placement.gpus_per_node", rule, gpus_per_node, fix)
    rule = f"must be <= {offered.nodes}, the nodes of {where}"
    require(nodes <= offered.nodes, "placement.nodes", rule, nodes, "override it with learner.parallel and num_engines")
    rule = f"must name a model on {where}, where prepare_policy has no GPU"
    require(not trains_from_scratch, "policy.model", rule, "scratch")
