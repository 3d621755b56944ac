"""Pod specs for a cluster profile: tasks without GPUs, and the three kinds of pods of a Ray job.

Flyte's Ray plugin makes all pods of a job from a base, the task's own pod, and merges an overlay into the head and the
workers. Maps are merged, lists are appended, and a set value wins. Settings of all three kinds therefore stand in the
base alone, each list entry once. The submitter is the base itself. Every call makes new objects, because flytekit and
its plugins change their arguments.

Source: `buildHeadPodTemplate`, `buildSubmitterPodTemplate` and `mergeCustomPodSpec` of
flyteplugins/go/tasks/plugins/k8s/ray/ray.go in flyteorg/flyte.
"""

from __future__ import annotations

from collections.abc import Sequence

from kubernetes import client as k8s

from slipstream.kubernetes.profile import CLUSTER_VARIABLE, NODE_VARIABLE, ClusterProfile, GpuNodes, PodSize, Scheduler

PRIMARY = "primary"
RAY_HEAD, RAY_WORKER = "ray-head", "ray-worker"
"""KubeRay's names for the primary container; an overlay with another name is dropped."""

RAY_TOKEN_KEY = "auth_token"  # KubeRay's key in the secret
USER = 1000  # user flytekit in both images
SUBMITTER = PodSize(cpus=1, memory_gib=4, ephemeral_storage_gib=4)
_RUNS, _SHM, _CHANNEL, _PROFILE = "runs", "shm", "compute-domain-channel", "profile"
_CLUSTERS = "/root/configs/clusters"  # of both images
GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"  # label of nodes with GPUs, by the GPU operator's feature discovery
PREFLIGHT_ACCOUNT = "slipstream-preflight"  # made by deploy/preflight, with the rights that a preflight needs


def preflight_pod(profile: ClusterProfile) -> k8s.V1PodSpec:
    """Make the pod of a preflight: a task's pod without GPUs, but with a token for the cluster's API."""
    pod = cpu_pod(profile)
    pod.service_account_name = PREFLIGHT_ACCOUNT
    pod.automount_service_account_token = True
    return pod


def cpu_pod(profile: ClusterProfile) -> k8s.V1PodSpec:
    """Make the pod of a task without GPUs, in which Ray is a local instance on the loopback interface."""
    pod = _with_shared_memory(_base(profile, profile.cpu), profile.cpu)
    pod.containers[0].env_from = _secrets(profile)
    if profile.gpu is not None and not profile.gpu.takes_cpu_pods:  # a node without room for a worker stops every job
        without = k8s.V1NodeSelectorRequirement(key=PRODUCT, operator="DoesNotExist")
        terms = k8s.V1NodeSelector(node_selector_terms=[k8s.V1NodeSelectorTerm(match_expressions=[without])])
        away = k8s.V1NodeAffinity(required_during_scheduling_ignored_during_execution=terms)
        pod.affinity = k8s.V1Affinity(node_affinity=away)
    return pod


def ray_base(profile: ClusterProfile) -> k8s.V1PodSpec:
    """Make the base of a Ray job's pods, which is the submitter's pod."""
    secret = k8s.V1SecretKeySelector(name=profile.ray_token_secret, key=RAY_TOKEN_KEY)
    token = [
        k8s.V1EnvVar(name="RAY_AUTH_MODE", value="token"),
        k8s.V1EnvVar(name="RAY_AUTH_TOKEN", value_from=k8s.V1EnvVarSource(secret_key_ref=secret)),
    ]
    pod = _base(profile, SUBMITTER, token)
    pod.node_selector = {**(pod.node_selector or {}), "kubernetes.io/arch": _gpu(profile).architecture.value}
    return pod


def head_overlay(profile: ClusterProfile) -> k8s.V1PodSpec:
    """Make the overlay of Ray's head, which runs the task's process and alone has the servers' credentials."""
    assert profile.head is not None
    resources = _resources(amounts(profile.head))
    container = k8s.V1Container(name=RAY_HEAD, resources=resources, env_from=_secrets(profile))
    return _with_shared_memory(k8s.V1PodSpec(containers=[container]), profile.head)


def worker_overlay(profile: ClusterProfile) -> k8s.V1PodSpec:
    """Make the overlay of a worker: all GPUs of a node, the fabric, and memory that may be pinned."""
    gpu = _gpu(profile)
    resources = _resources(worker_amounts(gpu))
    # With a channel of the ComputeDomain NCCL reaches other nodes over NVLink, or fails with an error.
    fabric = {"NCCL_DEBUG": "WARN", **({"NCCL_MNNVL_ENABLE": "1"} if gpu.channel_claim_template else {})}
    container = k8s.V1Container(
        name=RAY_WORKER,
        resources=resources,
        env=[k8s.V1EnvVar(name=name, value=value) for name, value in fabric.items()],
        # RDMA pins the memory that it sends, beyond the limit of locked memory.
        security_context=k8s.V1SecurityContext(capabilities=k8s.V1Capabilities(add=["IPC_LOCK"])),
    )
    pod = k8s.V1PodSpec(
        containers=[container],
        node_selector={PRODUCT: gpu.product},
        affinity=_same_clique(gpu.clique_label) if gpu.clique_label else None,
    )
    if gpu.channel_claim_template is not None:
        resources.claims = [k8s.CoreV1ResourceClaim(name=_CHANNEL)]
        claim = k8s.V1PodResourceClaim(name=_CHANNEL, resource_claim_template_name=gpu.channel_claim_template)
        pod.resource_claims = [claim]
    return _with_shared_memory(pod, gpu.pod)


def labels(component: str) -> dict[str, str]:
    """Labels that the network policies in deploy/ select."""
    return {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/component": component}


def queue_labels(profile: ClusterProfile) -> dict[str, str]:
    """Labels of the Ray job, by which Kueue, or Volcano through KubeRay, starts all of its pods together or none.

    Source: KubeRay's guides to Kueue and Volcano; batchscheduler/volcano/volcano_scheduler.go of KubeRay 1.6.
    """
    if profile.queue is None:
        return {}
    by_scheduler = {Scheduler.KUEUE: "kueue.x-k8s.io/queue-name", Scheduler.VOLCANO: "volcano.sh/queue-name"}
    return {by_scheduler[profile.queue.scheduler]: profile.queue.name}


def worker_annotations(profile: ClusterProfile) -> dict[str, str]:
    """Annotations of the workers, by which Kueue keeps them in one NVLink domain if its queue knows the topology."""
    if profile.queue is None or not profile.queue.knows_topology:
        return {}
    label = _gpu(profile).clique_label
    return {"kueue.x-k8s.io/podset-required-topology": label} if label else {}


def _base(profile: ClusterProfile, size: PodSize, env: Sequence[k8s.V1EnvVar] = ()) -> k8s.V1PodSpec:
    storage = profile.storage
    assert storage is not None
    node = k8s.V1ObjectFieldSelector(field_path="spec.nodeName")  # a host name inside the pod is the pod's name
    shared = [
        k8s.V1EnvVar(name=CLUSTER_VARIABLE, value=profile.name),
        # A policy of the hub is a directory of links into this directory, which later tasks follow.
        k8s.V1EnvVar(name="HF_HOME", value=f"{storage.mount_path}/hub"),
        k8s.V1EnvVar(name=NODE_VARIABLE, value_from=k8s.V1EnvVarSource(field_ref=node)),
    ]
    tolerations = [
        k8s.V1Toleration(key=t.key, operator="Exists" if t.value is None else "Equal", value=t.value, effect=t.effect)
        for t in profile.tolerations
    ]
    mounts = [k8s.V1VolumeMount(name=_RUNS, mount_path=storage.mount_path)]
    claim = k8s.V1PersistentVolumeClaimVolumeSource(claim_name=storage.claim)
    volumes = [k8s.V1Volume(name=_RUNS, persistent_volume_claim=claim)]
    if profile.config_map is not None:
        file = f"{profile.name}.yaml"
        path = f"{_CLUSTERS}/{file}"
        mounts.append(k8s.V1VolumeMount(name=_PROFILE, mount_path=path, sub_path=file, read_only=True))
        volumes.append(k8s.V1Volume(name=_PROFILE, config_map=k8s.V1ConfigMapVolumeSource(name=profile.config_map)))
    rights = k8s.V1SecurityContext(allow_privilege_escalation=False, capabilities=k8s.V1Capabilities(drop=["ALL"]))
    container = k8s.V1Container(
        name=PRIMARY,
        resources=_resources(amounts(size)),
        env=[*shared, *env],
        volume_mounts=mounts,
        security_context=rights,
    )
    return k8s.V1PodSpec(
        containers=[container],
        volumes=volumes,
        node_selector=dict(profile.labels) or None,
        tolerations=tolerations or None,
        security_context=k8s.V1PodSecurityContext(
            run_as_non_root=True,
            run_as_user=USER,
            run_as_group=USER,
            fs_group=storage.group,
            fs_group_change_policy="OnRootMismatch",
            seccomp_profile=k8s.V1SeccompProfile(type="RuntimeDefault"),
        ),
        service_account_name=profile.service_account,
        automount_service_account_token=False,  # the preflight alone calls the cluster's API
        enable_service_links=False,
    )


def amounts(size: PodSize) -> dict[str, str]:
    """Convert a pod's size to Kubernetes quantities."""
    return {
        "cpu": str(size.cpus),
        "memory": f"{size.memory_gib}Gi",
        "ephemeral-storage": f"{size.ephemeral_storage_gib}Gi",
    }


def worker_amounts(gpu: GpuNodes) -> dict[str, str]:
    """Convert what a worker takes to Kubernetes quantities: its pod's size, all GPUs of a node, and RDMA."""
    extended = {GPU: gpu.gpus_per_node, **gpu.rdma_resources}
    return {**amounts(gpu.pod), **{name: str(count) for name, count in extended.items()}}


def _resources(asked: dict[str, str]) -> k8s.V1ResourceRequirements:
    """Make requests equal to limits, so that a pod is never evicted for the use of another."""
    return k8s.V1ResourceRequirements(requests=dict(asked), limits=dict(asked))


def _with_shared_memory(pod: k8s.V1PodSpec, size: PodSize) -> k8s.V1PodSpec:
    """Mount memory of the pod at /dev/shm in place of Kubernetes' 64 MiB."""
    if size.shared_memory_gib:
        memory = k8s.V1EmptyDirVolumeSource(medium="Memory", size_limit=f"{size.shared_memory_gib}Gi")
        pod.volumes = [*(pod.volumes or []), k8s.V1Volume(name=_SHM, empty_dir=memory)]
        (container,) = pod.containers
        mount = k8s.V1VolumeMount(name=_SHM, mount_path="/dev/shm")
        container.volume_mounts = [*(container.volume_mounts or []), mount]
    return pod


def _same_clique(label: str) -> k8s.V1Affinity:
    """Affinity that keeps all workers of a Ray cluster in the NVLink domain of the first worker."""
    term = k8s.V1PodAffinityTerm(
        topology_key=label,
        label_selector=k8s.V1LabelSelector(match_labels={"ray.io/node-type": "worker"}),
        match_label_keys=["ray.io/cluster"],
    )
    return k8s.V1Affinity(pod_affinity=k8s.V1PodAffinity(required_during_scheduling_ignored_during_execution=[term]))


def _secrets(profile: ClusterProfile) -> list[k8s.V1EnvFromSource] | None:
    names = [service.secret for service in (profile.tracking, profile.object_store) if service and service.secret]
    return [k8s.V1EnvFromSource(secret_ref=k8s.V1SecretEnvSource(name=name)) for name in names] or None


def _gpu(profile: ClusterProfile) -> GpuNodes:
    assert profile.gpu is not None
    return profile.gpu
