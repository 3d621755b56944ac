"""Preflight: checks that a cluster has all that a run needs, by the Kubernetes API, MLflow's server and a pod.

Each check is a row: the subject, the need, and a judgement that asks the API and says what it found, and the fix where
that is not enough. A refusal or a time-out of the cluster is a finding and raises no error.
"""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

from kubernetes import client as k8s
from kubernetes.utils.quantity import parse_quantity

from slipstream.config import ConfigError, require
from slipstream.kubernetes import pods
from slipstream.kubernetes.kubernetes_api import Api, Finding, Refusal, State, connect, delete
from slipstream.kubernetes.profile import ClusterProfile, GpuNodes, PodSize, Queue, Scheduler

_RAY = ("rayjobs.ray.io", "v1", "KubeRay")  # custom resource, version, provider
_DOMAIN = ("computedomains.resource.nvidia.com", "v1beta1", "NVIDIA's DRA driver")
_QUEUES = {
    Scheduler.KUEUE: ("localqueues.kueue.x-k8s.io", "v1beta2", "Kueue >= 0.14"),
    Scheduler.VOLCANO: ("queues.scheduling.volcano.sh", "v1beta1", "Volcano"),
}
_CHANNEL_CLASS = "compute-domain-default-channel.nvidia.com"  # device class of the DRA driver's channels
_KUEUE_CONFIG = ("kueue-manager-config", "kueue-system")
_ARCHITECTURE = "kubernetes.io/arch"
_UNKNOWN_IMAGE = "slipstream:preflight"  # admission checks the name; a dry run pulls no image
_BLOCKING = ("NoSchedule", "NoExecute")
_SHARED = "ReadWriteMany"
_WAITS = "WaitForFirstConsumer"
_DRA = "resource.k8s.io"
_OTHER_PODS = frozenset({"BestEffort", "Terminating"})  # scopes of quotas
_EVERY_S = 1.0
_PROBE_S = 120.0  # time of the pod that writes to the shared root
_COLUMNS = 100
_ROOT = "shared root"

Judgement = tuple[str, str]
"""Words for what was found, and the fix if it is not enough."""


def _row(
    what: str, needed: str, judge: Callable[[], Judgement], *, right: str, absent: str = "", refused: str = ""
) -> Finding:
    """Make the row of a check by calls to the API server; `refused` is the fix if it refuses the object that was sent.

    `right` and `absent` are as in `Refusal.finding`.
    """
    try:
        found, fix = judge()
    except Refusal as refusal:
        if refused and refusal.status in (400, 403, 422):
            return Finding.of(what, found=refusal.reason, needed=needed, fix=refused)
        return refusal.finding(what, needed=needed, right=right, absent=absent)
    return Finding.of(what, found=found, needed=needed, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightRecord:
    """Findings of a preflight."""

    cluster: str
    namespace: str
    findings: tuple[Finding, ...]

    @property
    def table(self) -> str:
        """The findings as text of at most 100 columns: missing ones first and in full, the others a line each."""
        order = [State.MISSING, State.UNCHECKED, State.FINE]
        rows = sorted(self.findings, key=lambda finding: order.index(finding.state))
        lines = []
        for row in rows:
            heading = f"{row.state.value}: {row.what}"
            if row.state is State.FINE:
                lines.append(shorten(f"{heading}: {row.found}", _COLUMNS, placeholder=" …"))
                continue
            parts = [("found", row.found), ("needed", row.needed), ("fix", row.fix)]
            lines += [shorten(heading, _COLUMNS), *(_wrapped(name, text) for name, text in parts if text)]
        return "\n".join(lines)

    @property
    def num_missing(self) -> int:
        """Number of findings that prevent a run."""
        return sum(finding.state is State.MISSING for finding in self.findings)


def _wrapped(name: str, text: str) -> str:
    indent = "  " + " " * len("needed: ")
    return fill(text, _COLUMNS, initial_indent=f"  {name}: ".ljust(len(indent)), subsequent_indent=indent)


def check(
    api: Api, profile: ClusterProfile, *, namespace: str, image: str | None = None, own_root: Path | None = None
) -> PreflightRecord:
    """Check all that runs on the cluster of `profile` need.

    Args:
        image: image with a shell for a pod that writes to the shared root; None starts no pod.
        own_root: shared root of this process in a pod of the cluster, which then writes in place of another pod.
    """
    require_pods(profile)
    require(namespace != "", "namespace", "must name a namespace", namespace)
    assert profile.storage is not None
    storage = profile.storage
    claim = _claim(api, namespace, storage.claim)
    findings = [*_installed(api, profile, namespace), *claim, *_named(api, profile, namespace)]
    findings += _dry_runs(api, pod_manifests(profile, image), namespace)
    if profile.tracking is not None:
        findings.append(_check_mlflow(profile.tracking.uri, timeout_s=api.timeout_s))
    needed = _writable(storage.mount_path)
    if own_root is not None:
        root = _check_own_root(own_root, storage.group)
    elif image is not None and all(row.state is not State.MISSING for row in claim):
        probe = partial(_probe, api, namespace, probe_pod(profile, image, _PROBE_S), storage.group)
        root = _row(_ROOT, needed, probe, right="create pods", absent="create the namespace")
    else:
        fix = f"see {claim[0].what} above, without which no pod starts" if image else "give --image to let a pod try"
        root = Finding(what=_ROOT, found="no pod was started", needed=needed, state=State.UNCHECKED, fix=fix)
    return PreflightRecord(cluster=profile.name, namespace=namespace, findings=(*findings, root))


def require_pods(profile: ClusterProfile) -> None:
    """Refuse the profile of this machine, which has no API to check."""
    require(not profile.is_local, "--cluster", "must name a cluster of pods", profile.name, "as in gb200")


def _installed(api: Api, profile: ClusterProfile, namespace: str) -> Iterator[Finding]:
    """Rows for nodes, and with GPUs for cluster-wide installations."""
    gpu = profile.gpu
    yield from _nodes(api, profile, gpu)
    if gpu is None:
        return
    domain = [_DOMAIN] if gpu.channel_claim_template else []
    for name, version, provider in (_RAY, *domain, *([_QUEUES[profile.queue.scheduler]] if profile.queue else [])):
        judge = partial(_judge_crd, api, name, version, provider)
        right, absent = "get customresourcedefinitions", f"install {provider}"
        yield _row(f"custom resource {name}", version, judge, right=right, absent=absent)
    if profile.queue is not None:
        yield from _queue(api, profile, profile.queue, namespace)
    if gpu.channel_claim_template is not None:
        yield _row(
            f"claim template {gpu.channel_claim_template}",
            "present",
            partial(_judge_template, api, namespace, gpu.channel_claim_template),
            right="read the API's groups and get resourceclaimtemplates",
            absent="create the ComputeDomain of deploy/, which makes it",
        )


def _nodes(api: Api, profile: ClusterProfile, gpu: GpuNodes | None) -> Iterator[Finding]:
    """Rows for nodes of workers, of Ray's head and of other pods, from one list; one row if the list is refused."""
    try:
        nodes = api.ask(api.core.list_node, label_selector=_selector(profile.labels)).items
    except Refusal as refusal:
        yield refusal.finding("nodes", needed=_listed(run_quota(profile)), right="list nodes", absent="")
        return
    if gpu is not None:
        yield from _gpu_nodes(profile, gpu, nodes)
    if gpu is None or not gpu.takes_cpu_pods:
        others = [node for node in nodes if gpu is None or pods.PRODUCT not in _labels(node)]
        reasons = [_unusable(node, _total(pods.amounts(profile.cpu)), profile) for node in others]
        or_else = "set gpu.takes_cpu_pods and leave room for these pods" if gpu else "lower the profile's cpu"
        needed = _listed(pods.amounts(profile.cpu))
        yield _room("nodes for pods without GPUs", needed, reasons, f"add one without GPUs, or {or_else}")


def _gpu_nodes(profile: ClusterProfile, gpu: GpuNodes, nodes: Sequence[Any]) -> Iterator[Finding]:
    """Rows for nodes of workers, and of Ray's head."""
    head = profile.head
    assert head is not None
    worker = pods.worker_amounts(gpu)
    needed = f"{gpu.nodes} {_where(gpu)}, each {_listed(worker)}"
    found, fix = _judge_nodes(profile, gpu, _total(worker), nodes)
    yield Finding.of("GPU nodes", found=found, needed=needed, fix=fix)
    alone = _total(pods.amounts(head), pods.amounts(pods.SUBMITTER))
    beside = _total(pods.amounts(head), pods.amounts(pods.SUBMITTER), worker)
    able = [node for node in nodes if _labels(node).get(_ARCHITECTURE) == gpu.architecture.value]
    yield _room(
        "nodes for Ray's head and submitter",
        f"{_listed(pods.amounts(head))} and {_listed(pods.amounts(pods.SUBMITTER))}, beside a worker",
        [
            _unusable(node, beside if _labels(node).get(pods.PRODUCT) == gpu.product else alone, profile)
            for node in able
        ],
        "smaller sizes of head and gpu.pod in the profile, or one more node of the architecture",
    )


def _room(what: str, needed: str, reasons: Sequence[str], fix: str) -> Finding:
    """Make the row of pods that need one node, from the reason against each node, empty for one with room."""
    fits = reasons.count("")
    return Finding.of(what, found=f"room on {fits} of {len(reasons)} nodes", needed=needed, fix="" if fits else fix)


def _labels(node: Any) -> dict[str, str]:
    return node.metadata.labels or {}


def _total(*sizes: Mapping[str, str]) -> dict[str, Decimal]:
    """Add up the amounts that the first of some pods names."""
    return {name: sum((parse_quantity(size[name]) for size in sizes), Decimal()) for name in sizes[0]}


def _queue(api: Api, profile: ClusterProfile, queue: Queue, namespace: str) -> Iterator[Finding]:
    """Rows for the queue, and for Kueue's mapping of the workers' claims, without which it admits no job."""
    kind, version, _ = _QUEUES[queue.scheduler]
    plural, _, group = kind.partition(".")
    custom = k8s.CustomObjectsApi(api.client)
    right, absent = f"get {kind}", f"kubectl apply -k deploy/{profile.name}, and deploy/kueue with Kueue"

    def judge_volcano() -> Judgement:
        answer = api.ask(custom.get_cluster_custom_object, group, version, plural, queue.name)
        state = answer.get("status", {}).get("state", "without state")
        return state, "" if state == "Open" else "open it, as its Volcano describes"

    def judge_kueue() -> Judgement:
        answer = api.ask(custom.get_namespaced_custom_object, group, version, namespace, plural, queue.name)
        conditions = {each["type"]: each for each in answer.get("status", {}).get("conditions", [])}
        active = conditions.get("Active", {})
        if active.get("status") == "True":
            return "active", ""
        return active.get("message") or "not active", "kubectl apply -k deploy/kueue, with the quota of your nodes"

    def judge_mapping() -> Judgement:
        answer = api.ask(api.core.read_namespaced_config_map, *_KUEUE_CONFIG)
        if any(_CHANNEL_CLASS in text for text in (answer.data or {}).values()):
            return "mapped", ""
        return "not mapped", "merge deploy/kueue/manager_config.yaml into it: Kueue >= 0.18 admits no unmapped claim"

    if queue.scheduler is Scheduler.VOLCANO:
        yield _row(f"queue {queue.name}", "Open", judge_volcano, right=right, absent=absent)
        return
    yield _row(f"queue {queue.name}", "active", judge_kueue, right=right, absent=absent)
    if profile.gpu is not None and profile.gpu.channel_claim_template is not None:
        right = f"get the configmap {_KUEUE_CONFIG[0]}"
        absent = "merge deploy/kueue/manager_config.yaml into Kueue's configuration, wherever it is kept"
        yield _row("Kueue's deviceClassMappings", _CHANNEL_CLASS, judge_mapping, right=right, absent=absent)


def _named(api: Api, profile: ClusterProfile, namespace: str) -> Iterator[Finding]:
    """Rows for named objects in the namespace; no value of a secret is read."""
    account = profile.service_account
    services = (service.secret for service in (profile.tracking, profile.object_store) if service)
    secrets = (*((name, ()) for name in services), (profile.ray_token_secret, (pods.RAY_TOKEN_KEY,)))
    for name, keys in secrets:
        if name is None:
            continue
        yield _row(
            f"secret {name}",
            f"keys {', '.join(keys)}" if keys else "present",
            partial(_judge_secret, api, namespace, name, keys),
            right="get secrets",
            absent=f"create it in namespace {namespace}, in the shape that deploy/ shows",
        )
    if account is not None:
        yield _row(
            f"service account {account}",
            "present",
            partial(_seen, "present", api, api.core.read_namespaced_service_account, account, namespace),
            right="get serviceaccounts",
            absent=f"create it in namespace {namespace}: deploy/ has it",
        )
    needed = run_quota(profile)
    judge = partial(_judge_quota, api, namespace, needed)
    yield _row("quota", f"room for {_listed(needed)}", judge, right="list resourcequotas")


def _dry_runs(api: Api, manifests: Mapping[str, Any], namespace: str) -> Iterator[Finding]:
    """Rows for a server-side dry run of each pod: schema, defaults and every admission plugin; no pod is created."""
    create = api.core.create_namespaced_pod
    for role, manifest in manifests.items():
        yield _row(
            f"pod {role}, dry run",
            "admitted",
            partial(_seen, "admitted", api, create, namespace, manifest, dry_run="All"),
            right="create pods",
            absent=f"create the namespace {namespace}",
            # An admission plugin refuses with 403 too, and its message names the rule that the pod breaks.
            refused="change the cluster profile, or the policy that refuses the pod",
        )


def _seen(word: str, api: Api, call: Callable[..., Any], *arguments: object, **options: object) -> Judgement:
    """Judge by the mere answer of a call."""
    api.ask(call, *arguments, **options)
    return word, ""


def run_quota(profile: ClusterProfile) -> dict[str, str]:
    """Resources of one task with GPUs, the largest unit that runs at once: all workers, head and submitter."""
    gpu, head = profile.gpu, profile.head
    if gpu is None or head is None:
        return {**pods.amounts(profile.cpu), "pods": "1"}
    sizes = [*[gpu.pod] * gpu.nodes, head, pods.SUBMITTER]
    together = PodSize(
        cpus=sum(size.cpus for size in sizes),
        memory_gib=sum(size.memory_gib for size in sizes),
        ephemeral_storage_gib=sum(size.ephemeral_storage_gib for size in sizes),
    )
    extended = {pods.GPU: gpu.gpus_per_node, **gpu.rdma_resources}
    more = {**{name: gpu.nodes * count for name, count in extended.items()}, "pods": len(sizes)}
    return {**pods.amounts(together), **{name: str(count) for name, count in more.items()}}


def pod_manifests(profile: ClusterProfile, image: str | None) -> dict[str, dict[str, Any]]:
    """Make a pod of each kind as Flyte and KubeRay make it."""
    specs = {"cpu": ("cpu", _plain(pods.cpu_pod(profile)))}
    if profile.gpu is not None:
        for role, overlay in (("head", pods.head_overlay(profile)), ("worker", pods.worker_overlay(profile))):
            specs[role] = ("ray", laid_over(_plain(pods.ray_base(profile)), _plain(overlay)))
    manifests = {}
    for role, (component, spec) in specs.items():
        metadata = {"generateName": "slipstream-preflight-", "labels": pods.labels(component)}
        containers = [{**container, "image": image or _UNKNOWN_IMAGE} for container in spec["containers"]]
        whole = {**spec, "containers": containers, "restartPolicy": "Never"}
        manifests[role] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole}
    return manifests


def _plain(spec: k8s.V1PodSpec) -> dict[str, Any]:
    plain: Any = k8s.ApiClient(k8s.Configuration()).sanitize_for_serialization(spec)
    return plain


def laid_over(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Merge `overlay` into `base` as Flyte's Ray plugin does: maps and the one container merge, lists are appended."""
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


def _listed(amounts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {amount}" for name, amount in amounts.items())


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _where(gpu: GpuNodes) -> str:
    return "in one clique" if gpu.clique_label else "in all"


def _judge_nodes(
    profile: ClusterProfile, gpu: GpuNodes, worker: Mapping[str, Decimal], nodes: Sequence[Any]
) -> Judgement:
    """Count the usable nodes of each clique, and the reasons against the other nodes."""
    usable: Counter[str] = Counter()
    unusable: Counter[str] = Counter()
    labels = {_ARCHITECTURE: gpu.architecture.value, pods.PRODUCT: gpu.product}
    for node in nodes:
        if labels.items() <= _labels(node).items():
            reason = _unusable(node, worker, profile, gpu.clique_label)
            (unusable if reason else usable)[reason or _labels(node).get(gpu.clique_label or "", "")] += 1
    largest = max(usable.values(), default=0)
    cliques = [
        f"{count} usable{f' in clique {clique}' if gpu.clique_label else ''}" for clique, count in usable.most_common()
    ]
    found = ", ".join([*cliques, *(f"{count} {reason}" for reason, count in unusable.most_common())])
    doubt = "are the labels of the profile those of the nodes? the GPU operator's feature discovery sets them"
    fewer = f"a cluster profile of at most {largest} nodes, or more nodes ready {_where(gpu)}"
    return found or f"none with {_selector(labels)}", "" if largest >= gpu.nodes else fewer if largest else doubt


def _unusable(
    node: Any, needed: Mapping[str, Decimal], profile: ClusterProfile, clique_label: str | None = None
) -> str:
    """Return why no pod with these amounts can run on the node; empty if one can."""
    ready = {condition.type: condition.status for condition in node.status.conditions or ()}.get("Ready")
    if ready != "True":
        return "not ready"
    if node.spec.unschedulable:
        return "cordoned"
    if clique_label is not None and clique_label not in _labels(node):
        return f"without label {clique_label}"
    for taint in node.spec.taints or ():
        if taint.effect in _BLOCKING and not any(each.covers(taint) for each in profile.tolerations):
            return f"with taint {taint.key}:{taint.effect}, which the pods do not tolerate"
    offered = node.status.allocatable or {}
    lacking = [name for name, amount in needed.items() if parse_quantity(offered.get(name, "0")) < amount]
    return f"with {lacking[0]} {offered.get(lacking[0], '0')}" if lacking else ""


def _judge_crd(api: Api, name: str, version: str, provider: str) -> Judgement:
    answer = api.ask(k8s.ApiextensionsV1Api(api.client).read_custom_resource_definition, name)
    served = [each.name for each in answer.spec.versions if each.served]
    conditions = {condition.type: condition.status for condition in (answer.status.conditions or ())}
    is_established = conditions.get("Established") == "True"
    fix = "" if version in served and is_established else f"install another version of {provider}"
    return ", ".join(served) + ("" if is_established else ", not established"), fix


def _judge_template(api: Api, namespace: str, name: str) -> Judgement:
    """Read the template in the API version that the cluster prefers."""
    groups = api.ask(k8s.ApisApi(api.client).get_api_versions).groups
    version = {group.name: group.preferred_version.version for group in groups}.get(_DRA, "")
    if not version:
        return f"no API {_DRA}", "Kubernetes >= 1.32 with dynamic resource allocation, and NVIDIA's DRA driver"
    read = k8s.CustomObjectsApi(api.client).get_namespaced_custom_object
    return _seen(f"{_DRA}/{version}", api, read, _DRA, version, namespace, "resourceclaimtemplates", name)


def _judge_secret(api: Api, namespace: str, name: str, wanted: Sequence[str]) -> Judgement:
    keys = sorted(api.ask(api.core.read_namespaced_secret, name, namespace).data or {})
    lacking = sorted(set(wanted) - set(keys))
    fix = "" if keys else "it is empty: add keys"
    return f"keys {', '.join(keys) or 'none'}", f"add the keys {', '.join(lacking)}" if lacking else fix


def _claim(api: Api, namespace: str, claim: str) -> list[Finding]:
    """Rows for the claim, bound or waiting for its first pod, and its storage class; every node may write to it."""
    what, needed = f"volume claim {claim}", f"Bound, {_SHARED}"
    try:
        answer = api.ask(api.core.read_namespaced_persistent_volume_claim, claim, namespace)
    except Refusal as refusal:
        fix = f"create it in namespace {namespace}: deploy/ has one to adapt"
        return [refusal.finding(what, needed=needed, right="get persistentvolumeclaims", absent=fix)]
    phase, modes, class_name = answer.status.phase, answer.spec.access_modes or [], answer.spec.storage_class_name
    rows = []
    if class_name is not None:
        judge, absent = partial(_judge_class, api, class_name), "name one of the cluster's own"
        row = _row(f"storage class {class_name}", "present", judge, right="get storageclasses", absent=absent)
        # Storage classes are cluster-wide, and few accounts may read them.
        is_hidden = phase == "Bound" and row.state is State.MISSING and row.found != "absent"
        rows = [replace(row, state=State.UNCHECKED, fix="the claim is bound") if is_hidden else row]
    waits = phase == "Pending" and any(row.found.endswith(_WAITS) for row in rows)
    wrong = "" if phase == "Bound" or waits else "kubectl describe pvc says why it is not bound"
    wrong = wrong if _SHARED in modes else f"it needs the mode {_SHARED}"
    found = f"{phase}, {', '.join(modes)}{', waits for its first pod' if waits else ''}"
    return [Finding.of(what, found=found, needed=needed, fix=wrong), *rows]


def _judge_class(api: Api, name: str) -> Judgement:
    answer = api.ask(k8s.StorageV1Api(api.client).read_storage_class, name)
    return f"{answer.provisioner}, {answer.volume_binding_mode}", ""


def _judge_quota(api: Api, namespace: str, needed: Mapping[str, str]) -> Judgement:
    """Find the quotas without room for a run; `cpu` bounds requests, and `limits.cpu` limits, which are equal.

    Pods of a run have requests and no deadline, so quotas of `_OTHER_PODS` do not bound them.
    """
    listed, lacking = api.ask(api.core.list_namespaced_resource_quota, namespace).items, []
    quotas = [each for each in listed if not (each.spec and _OTHER_PODS.intersection(each.spec.scopes or ()))]
    for quota in quotas:
        hard, used = quota.status.hard or {}, quota.status.used or {}
        for name, most in sorted(hard.items()):
            amount = needed.get(re.sub(r"^(requests\.|limits\.|count/)", "", name), "0")
            if parse_quantity(most) - parse_quantity(used.get(name, "0")) < parse_quantity(amount):
                lacking.append(f"{quota.metadata.name}: {used.get(name, '0')} of {most} {name} used")
    if lacking:
        return ", ".join(lacking), "raise it, or wait for what uses it now"
    return f"{len(quotas)} quotas, room in each" if quotas else "none set", ""


def _check_mlflow(uri: str, *, timeout_s: float) -> Finding:
    """Check that MLflow's server answers on its health route from this host."""
    fix = "is the server up? an address inside the cluster answers pods alone: run the preflight from one"
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout_s) as answer:
            found, fix = f"{answer.status}", "" if answer.status == 200 else fix
    except urllib.error.HTTPError as error:
        found = f"{error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        found = f"no answer: {error!r}"
    return Finding.of(f"MLflow at {uri}", found=found, needed="200 on /health", fix=fix)


def _probe(api: Api, namespace: str, manifest: Mapping[str, Any], group: int) -> Judgement:
    """Start a pod that writes, reads and removes a file on the shared root; the pod is always deleted."""
    name = api.ask(api.core.create_namespaced_pod, namespace, manifest).metadata.name
    try:
        found, fix = _wait(api, namespace, name, _PROBE_S, group)
    except Refusal as refusal:
        found, fix = refusal.reason, "let this account get pods"
    finally:
        was_deleted = delete(api, namespace, name)
    return (found, fix) if was_deleted else (f"{found}; pod {name} could not be deleted", fix or "delete it")


def _check_own_root(root: Path, group: int) -> Finding:
    """Check that this process, with every task's user and group, can write, read and remove a file under the root."""
    mark = root / f".preflight-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        mark.write_text("written")
        fix, found = "" if mark.read_text() == "written" else _fix(group), "written, read and removed"
        mark.unlink()
    except OSError as error:
        fix, found = _fix(group), str(error)
    return Finding.of(_ROOT, found=found, needed=_writable(root), fix=fix)


def _writable(root: str | Path) -> str:
    return f"{root} writable by user {pods.USER}"


def _fix(group: int) -> str:
    return f"chown the volume's root to group {group}, or set fsGroup to its group"


def probe_pod(profile: ClusterProfile, image: str, timeout_s: float) -> dict[str, Any]:
    """Make a small pod from a task's pod without GPUs, with another command and without the servers' credentials."""
    assert profile.storage is not None
    path = f"{profile.storage.mount_path}/.preflight-$HOSTNAME"
    script = f'set -e; echo written > "{path}"; test "$(cat "{path}")" = written; rm "{path}"'
    small = {"cpu": "100m", "memory": "64Mi"}
    manifest = pod_manifests(profile, image)["cpu"]
    (container,) = manifest["spec"]["containers"]
    container.pop("envFrom", None)
    container["command"] = ["sh", "-c", script]
    container["resources"] = {"requests": small, "limits": small}
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    manifest["spec"]["activeDeadlineSeconds"] = int(timeout_s)
    return manifest


def _wait(api: Api, namespace: str, name: str, timeout_s: float, group: int) -> Judgement:
    """Wait for the pod; returns its end in words, and the fix if it could not write."""
    waited_s, phase, reason = 0.0, "Pending", "no status"
    while waited_s < timeout_s:
        pod = api.ask(api.core.read_namespaced_pod, name, namespace)
        if pod.status.phase == "Succeeded":
            return "written, read and removed", ""
        phase, reason = pod.status.phase, _reason(pod)
        if pod.status.phase == "Failed":
            was_started = any(each.state.terminated is not None for each in pod.status.container_statuses or ())
            return f"failed: {reason}", _fix(group) if was_started else "see the reason: its container never started"
        time.sleep(_EVERY_S)
        waited_s += _EVERY_S
    fix = "kubectl describe node says what keeps pods from it" if "nodes are available" in reason else ""
    return f"{phase} after {timeout_s:g} s: {reason}", fix or "let the cluster start a small pod of this image in time"


def _reason(pod: Any) -> str:
    """Return the message of the pod's container, else of a condition that does not hold."""
    for status in pod.status.container_statuses or ():
        state = status.state
        if state.terminated is not None:
            return (state.terminated.message or state.terminated.reason or "").strip()
        if state.waiting is not None:
            return f"{state.waiting.reason}: {state.waiting.message or ''}".strip(": ")
    unmet = [item.message for item in pod.status.conditions or () if item.status != "True" and item.message]
    return unmet[0] if unmet else "no reason given"


NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File with the namespace of a pod, mounted by Kubernetes."""


def preflight(profile: ClusterProfile, *, root: Path, timeout_s: float) -> PreflightRecord:
    """Check the cluster of this pod."""
    namespace = own_namespace()
    return check(connect(context=None, timeout_s=timeout_s), profile, namespace=namespace, own_root=root)


def own_namespace(path: Path = NAMESPACE_FILE) -> str:
    """Read the namespace of this pod, which must have a service account's token."""
    require(path.is_file(), "preflight", "must run in a pod with a service account's token", f"no {path}")
    return path.read_text().strip()


def require_ready(record: PreflightRecord) -> None:
    """Refuse a cluster with missing findings, with the table of them all."""
    if record.num_missing:
        raise ConfigError(f"cluster {record.cluster} lacks {record.num_missing} of what its runs need:\n{record.table}")
