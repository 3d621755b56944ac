"""What a cluster lacks, asked before a run waits for it: of the Kubernetes API, of MLflow, and of a pod.

Most questions are rows of one table (`_Row`): what is looked at, how the API is asked, how its answer is judged, and
what to do when it fails. No check raises because the cluster refuses or is silent.
"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kubernetes import client as k8s
from kubernetes.utils.quantity import parse_quantity

from slipstream.config import ConfigError, require
from slipstream.kubernetes.cluster_needs import CrdNeed, GpuNodesNeed, Needs, Permission, SecretNeed, needs_of
from slipstream.kubernetes.kubernetes_api import Api, Finding, Refusal, State, connect
from slipstream.kubernetes.profile import ClusterProfile
from slipstream.workers.placement.table import table

_BLOCKING = ("NoSchedule", "NoExecute")
_SHARED = "ReadWriteMany"
_DRA = "resource.k8s.io"
_EVERY_S = 1.0
_ROOT = "shared root"


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One question to the API server."""

    what: str
    needed: str
    ask: Callable[[], Any]
    judge: Callable[[Any], tuple[str, str]]  # an answer -> what was found, and the fix where it is not enough
    right: str  # that the caller must have, as in `list nodes`
    absent: str = ""  # the fix where there is no such thing
    refused: str = ""  # the fix where the server refuses what was sent, rather than who sent it

    def finding(self) -> Finding:
        """The row with its answer."""
        answer = self.ask()
        if not isinstance(answer, Refusal):
            found, fix = self.judge(answer)
            return Finding.of(self.what, found=found, needed=self.needed, is_fine=not fix, fix=fix)
        if self.refused and answer.status in (400, 403, 422):
            return Finding.of(self.what, found=answer.reason, needed=self.needed, is_fine=False, fix=self.refused)
        return answer.finding(self.what, needed=self.needed, right=self.right, absent=self.absent)


def check(api: Api, needs: Needs) -> list[Finding]:
    """Ask everything; a check that the cluster refuses or leaves unanswered is a finding like any other."""
    core, namespace = k8s.CoreV1Api(api.client), needs.namespace
    findings = [row.finding() for row in _installed(api, needs)]
    if needs.claim is not None:
        findings += check_claim(api, namespace, needs.claim)
    findings += [row.finding() for row in _named(api, needs)]
    if needs.permissions:
        findings += check_permissions(api, namespace, needs.permissions)
    if needs.quota:
        findings += check_quota(api, namespace, needs.quota)
    findings += [
        # A server-side dry run: the pod's schema, defaults and every admission plugin; nothing is created. A plugin
        # refuses with 403 as well: its sentence says which rule the pod breaks.
        _Row(
            what=f"pod {role}, dry run",
            needed="admitted",
            ask=partial(api.ask, core.create_namespaced_pod, namespace, manifest, dry_run="All"),
            judge=lambda _: ("admitted", ""),
            right="create pods",
            absent=f"create the namespace {namespace}",
            refused="change the cluster profile, or the policy that refuses the pod",
        ).finding()
        for role, manifest in needs.pods.items()
    ]
    if needs.mlflow_uri is not None:
        findings += check_mlflow(needs.mlflow_uri, timeout_s=api.timeout_s)
    if needs.own_root is not None:
        findings += check_own_root(needs.own_root, needs)
    elif needs.claim is not None:
        findings += check_root(api, needs)
    return findings


def _installed(api: Api, needs: Needs) -> Iterator[_Row]:
    """Rows of nodes, and of what is installed for the whole cluster."""
    if needs.gpu_nodes is not None:
        need = needs.gpu_nodes
        selector = ",".join(f"{name}={value}" for name, value in sorted(need.labels.items()))
        amounts = ", ".join(f"{name} {amount}" for name, amount in need.allocatable.items())
        yield _Row(
            what="GPU nodes",
            needed=f"{need.nodes} {_where(need)}, each {amounts}",
            ask=partial(api.ask, k8s.CoreV1Api(api.client).list_node, label_selector=selector),
            judge=partial(_judge_nodes, need, selector),
            right="list nodes",
        )
    for crd in needs.crds:
        yield _Row(
            what=f"custom resource {crd.name}",
            needed=crd.version,
            ask=partial(api.ask, k8s.ApiextensionsV1Api(api.client).read_custom_resource_definition, crd.name),
            judge=partial(_judge_crd, crd),
            right="get customresourcedefinitions",
            absent=f"install {crd.provider}",
        )
    if needs.claim_template is not None:
        yield _Row(
            what=f"claim template {needs.claim_template}",
            needed="present",
            ask=partial(_ask_template, api, needs.namespace, needs.claim_template),
            judge=_judge_template,
            right="get resourceclaimtemplates",
            absent="create the ComputeDomain of deploy/, which makes it",
        )


def _named(api: Api, needs: Needs) -> Iterator[_Row]:
    """Rows of what has a name in the namespace; no secret's value is looked at."""
    core, namespace = k8s.CoreV1Api(api.client), needs.namespace
    for secret in needs.secrets:
        yield _Row(
            what=f"secret {secret.name}",
            needed=f"keys {', '.join(secret.keys)}" if secret.keys else "present",
            ask=partial(api.ask, core.read_namespaced_secret, secret.name, namespace),
            judge=partial(_judge_secret, secret),
            right="get secrets",
            absent=f"create it in namespace {namespace}, in the shape that deploy/ shows",
        )
    if needs.service_account is not None:
        yield _Row(
            what=f"service account {needs.service_account}",
            needed="present",
            ask=partial(api.ask, core.read_namespaced_service_account, needs.service_account, namespace),
            judge=lambda _: ("present", ""),
            right="get serviceaccounts",
            absent=f"create it in namespace {namespace}: deploy/ has it",
        )


def _where(need: GpuNodesNeed) -> str:
    return "in one clique" if need.clique_label else "in all"


def _judge_nodes(need: GpuNodesNeed, selector: str, answer: Any) -> tuple[str, str]:
    """Usable nodes of each clique, and why the others are not usable."""
    usable: Counter[str] = Counter()
    unusable: Counter[str] = Counter()
    for node in answer.items:
        reason, clique = _unusable(node, need), (node.metadata.labels or {}).get(need.clique_label, "")
        (unusable if reason else usable)[reason or clique] += 1
    largest = max(usable.values(), default=0)
    cliques = [
        f"{count} usable{f' in clique {clique}' if need.clique_label else ''}" for clique, count in usable.most_common()
    ]
    found = ", ".join([*cliques, *(f"{count} {reason}" for reason, count in unusable.most_common())])
    doubt = "are the labels of the profile those of the nodes? the GPU operator's feature discovery sets them"
    fewer = f"a cluster profile of at most {largest} nodes, or more nodes ready {_where(need)}"
    return found or f"none with {selector}", "" if largest >= need.nodes else fewer if largest else doubt


def _unusable(node: Any, need: GpuNodesNeed) -> str:
    """Why no worker can run here; empty if one can."""
    ready = {condition.type: condition.status for condition in node.status.conditions or ()}.get("Ready")
    if ready != "True":
        return "not ready"
    if node.spec.unschedulable:
        return "cordoned"
    if need.clique_label is not None and need.clique_label not in (node.metadata.labels or {}):
        return f"without label {need.clique_label}"
    for taint in node.spec.taints or ():
        if taint.effect in _BLOCKING and taint.key not in need.tolerated:
            return f"with taint {taint.key}, which the pods do not tolerate"
    for name, amount in need.allocatable.items():
        offered = (node.status.allocatable or {}).get(name, "0")
        if parse_quantity(offered) < parse_quantity(amount):
            return f"with {name} {offered}"
    return ""


def _judge_crd(crd: CrdNeed, answer: Any) -> tuple[str, str]:
    served = [version.name for version in answer.spec.versions if version.served]
    conditions = {condition.type: condition.status for condition in (answer.status.conditions or ())}
    is_established = conditions.get("Established") == "True"
    is_fine = crd.version in served and is_established
    fix = "" if is_fine else f"install another version of {crd.provider}"
    return ", ".join(served) + ("" if is_established else ", not established"), fix


def _ask_template(api: Api, namespace: str, name: str) -> Any:
    """The version of the API that the cluster prefers and has the template in; empty without the API."""
    groups = api.ask(k8s.ApisApi(api.client).get_api_versions)
    if isinstance(groups, Refusal):
        return groups
    version = {group.name: group.preferred_version.version for group in groups.groups}.get(_DRA, "")
    read = k8s.CustomObjectsApi(api.client).get_namespaced_custom_object
    answer = api.ask(read, _DRA, version, namespace, "resourceclaimtemplates", name) if version else None
    return answer if isinstance(answer, Refusal) else version


def _judge_template(version: str) -> tuple[str, str]:
    if version:
        return f"{_DRA}/{version}", ""
    return f"no API {_DRA}", "Kubernetes >= 1.32 with dynamic resource allocation, and NVIDIA's DRA driver"


def _judge_secret(secret: SecretNeed, answer: Any) -> tuple[str, str]:
    keys = sorted(answer.data or {})
    lacking = sorted(set(secret.keys) - set(keys))
    fix = "" if keys else "it is empty: add keys"
    return f"keys {', '.join(keys) or 'none'}", f"add the keys {', '.join(lacking)}" if lacking else fix


def check_claim(api: Api, namespace: str, claim: str) -> list[Finding]:
    """The claim is bound, or waits for its first pod, and every node can write to it; its storage class exists."""
    what, needed = f"volume claim {claim}", f"Bound, {_SHARED}"
    fix = f"create it in namespace {namespace}: deploy/ has one to adapt"
    answer = api.ask(k8s.CoreV1Api(api.client).read_namespaced_persistent_volume_claim, claim, namespace)
    if isinstance(answer, Refusal):
        return [answer.finding(what, needed=needed, right="get persistentvolumeclaims", absent=fix)]
    phase, modes, class_name = answer.status.phase, answer.spec.access_modes or [], answer.spec.storage_class_name
    storage_class = None if class_name is None else api.ask(k8s.StorageV1Api(api.client).read_storage_class, class_name)
    is_known = storage_class is not None and not isinstance(storage_class, Refusal)
    waits = is_known and storage_class.volume_binding_mode == "WaitForFirstConsumer"
    is_fine = _SHARED in modes and (phase == "Bound" or (phase == "Pending" and waits))
    wrong = "kubectl describe pvc says why it is not bound" if _SHARED in modes else f"it needs the mode {_SHARED}"
    found = f"{phase}, {', '.join(modes)}{', waits for its first pod' if phase == 'Pending' and waits else ''}"
    rows = [Finding.of(what, found=found, needed=needed, is_fine=is_fine, fix=wrong)]
    if class_name is None:
        return rows
    row = _Row(
        what=f"storage class {class_name}",
        needed="present",
        ask=lambda: storage_class,
        judge=lambda answer: (answer.provisioner, ""),
        right="get storageclasses",
        absent="name one of the cluster's own",
    ).finding()
    # Storage classes belong to the cluster: few accounts may see them.
    is_hidden = isinstance(storage_class, Refusal) and not storage_class.is_absent and phase == "Bound"
    return [*rows, replace(row, state=State.UNCHECKED, fix="the claim is bound") if is_hidden else row]


def check_permissions(api: Api, namespace: str, permissions: tuple[Permission, ...]) -> list[Finding]:
    """A row for each right that the caller lacks; one row in all if it has every one."""
    review, rows = k8s.AuthorizationV1Api(api.client).create_self_subject_access_review, []
    fix = f"bind a role with it in namespace {namespace}: deploy/ has one"

    def judge(answer: Any) -> tuple[str, str]:
        reason = answer.status.reason
        return ("allowed", "") if answer.status.allowed else (f"denied{f': {reason}' if reason else ''}", fix)

    for permission in permissions:
        asked = {"verb": permission.verb, "group": permission.group, "resource": permission.resource}
        row = _Row(
            what=f"right to {permission}",
            needed="allowed",
            ask=partial(api.ask, review, {"spec": {"resourceAttributes": {"namespace": namespace, **asked}}}),
            judge=judge,
            right="create selfsubjectaccessreviews",
        )
        rows.append(row.finding())
    wanted = f"{len(permissions)} rights in {namespace}"
    lacking = [row for row in rows if row.state is not State.FINE]
    return lacking or [Finding(what="rights", found=wanted, needed=wanted, state=State.FINE)]


def check_quota(api: Api, namespace: str, needed: Mapping[str, str]) -> list[Finding]:
    """A row for each quota that leaves less than a run takes; one row in all if none does."""
    answer = api.ask(k8s.CoreV1Api(api.client).list_namespaced_resource_quota, namespace)
    if isinstance(answer, Refusal):
        return [answer.finding("quota", needed="room for the pods", right="list resourcequotas", absent="")]
    rows = []
    for quota in answer.items:
        hard, used = quota.status.hard or {}, quota.status.used or {}
        for name in sorted(needed.keys() & hard.keys()):
            left = parse_quantity(hard[name]) - parse_quantity(used.get(name, "0"))
            if left < parse_quantity(needed[name]):
                found = f"{used.get(name, '0')} of {hard[name]} used"
                what, fix = f"quota {quota.metadata.name}, {name}", "raise it, or wait for what uses it now"
                rows.append(
                    Finding(what=what, found=found, needed=f"{needed[name]} free", state=State.MISSING, fix=fix)
                )
    found = f"{len(answer.items)} quotas, room in each" if answer.items else "none set"
    return rows or [Finding(what="quota", found=found, needed="room for the pods", state=State.FINE)]


def check_mlflow(uri: str, *, timeout_s: float) -> list[Finding]:
    """MLflow's server answers on its health route, as seen from here."""
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout_s) as answer:
            found, is_fine = f"{answer.status}", answer.status == 200
    except urllib.error.HTTPError as error:
        found, is_fine = f"{error.code} {error.reason}", False
    except OSError as error:
        found, is_fine = f"no answer: {error}", False
    fix = "is the server up? an address inside the cluster answers pods alone: run the preflight from one"
    return [Finding.of(f"MLflow at {uri}", found=found, needed="200 on /health", is_fine=is_fine, fix=fix)]


def findings_table(findings: Sequence[Finding]) -> str:
    """Plain text: state, what, found, needed, fix; what is missing first."""
    order = [State.MISSING, State.UNCHECKED, State.FINE]
    rows = sorted(findings, key=lambda finding: order.index(finding.state))
    head = ["", "what", "found", "needed", "fix"]
    return table([head, *[[row.state.value, row.what, row.found, row.needed, row.fix] for row in rows]])


def num_missing(findings: Sequence[Finding]) -> int:
    """How many findings stand in the way of a run."""
    return sum(finding.state is State.MISSING for finding in findings)


def check_root(api: Api, needs: Needs, *, sleep: Callable[[float], None] = time.sleep) -> list[Finding]:
    """Start a pod that writes, reads back and removes one file; it is deleted whatever happens."""
    needed = f"{needs.mount_path} writable by user {needs.user}"
    if needs.probe_image is None:
        fix = "give --image to let a pod try"
        return [Finding(what=_ROOT, found="no pod was started", needed=needed, state=State.UNCHECKED, fix=fix)]
    core = k8s.CoreV1Api(api.client)
    created = api.ask(core.create_namespaced_pod, needs.namespace, probe_pod(needs))
    if isinstance(created, Refusal):
        return [created.finding(_ROOT, needed=needed, right="create pods", absent="create the namespace")]
    name = created.metadata.name
    try:
        found, is_fine = _wait(api, needs, name, sleep)
    finally:
        deleted = api.ask(core.delete_namespaced_pod, name, needs.namespace, grace_period_seconds=0)
    left = f"; pod {name} could not be deleted" if isinstance(deleted, Refusal) and not deleted.is_absent else ""
    fix = _fix(needs)
    return [Finding.of(_ROOT, found=f"{found}{left}", needed=needed, is_fine=is_fine and not left, fix=fix)]


def check_own_root(root: Path, needs: Needs) -> list[Finding]:
    """This process, as the user and group of every task, can write, read back and remove a file under the root."""
    mark = root / f".preflight-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        mark.write_text("written")
        is_fine, found = mark.read_text() == "written", "written, read and removed"
        mark.unlink()
    except OSError as error:
        is_fine, found = False, str(error)
    needed = f"{root} writable by user {needs.user}"
    return [Finding.of(_ROOT, found=found, needed=needed, is_fine=is_fine, fix=_fix(needs))]


def _fix(needs: Needs) -> str:
    return f"chown the volume's root to group {needs.group}, or set fsGroup to its group"


def probe_pod(needs: Needs) -> dict[str, Any]:
    """The pod, as strict as those of the tasks."""
    path = f"{needs.mount_path}/.preflight-$HOSTNAME"
    script = f'set -e; echo written > "{path}"; test "$(cat "{path}")" = written; rm "{path}"'
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    resources = {"cpu": "100m", "memory": "64Mi"}
    container = {
        "name": "probe",
        "image": needs.probe_image,
        "command": ["sh", "-c", script],
        "volumeMounts": [{"name": "root", "mountPath": needs.mount_path}],
        "securityContext": security,
        "resources": {"requests": resources, "limits": resources},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "slipstream-preflight-"},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(needs.probe_timeout_s),
            "automountServiceAccountToken": False,
            **({"serviceAccountName": needs.service_account} if needs.service_account else {}),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": needs.user,
                "runAsGroup": needs.group,
                "fsGroup": needs.group,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": needs.claim}}],
        },
    }


def _wait(api: Api, needs: Needs, name: str, sleep: Callable[[float], None]) -> tuple[str, bool]:
    """What became of the pod, and whether it could write."""
    waited_s, phase, reason = 0.0, "Pending", "no status"
    while waited_s < needs.probe_timeout_s:
        pod = api.ask(k8s.CoreV1Api(api.client).read_namespaced_pod, name, needs.namespace)
        if isinstance(pod, Refusal):
            return pod.reason, False
        if pod.status.phase == "Succeeded":
            return "written, read and removed", True
        phase, reason = pod.status.phase, _reason(pod)
        if pod.status.phase == "Failed":
            return f"failed: {reason}", False
        sleep(_EVERY_S)
        waited_s += _EVERY_S
    return f"{phase} after {needs.probe_timeout_s:g} s: {reason}", False


def _reason(pod: Any) -> str:
    """The pod's own words: of its container, else of a condition that does not hold."""
    for status in pod.status.container_statuses or ():
        state = status.state
        if state.terminated is not None:
            return (state.terminated.message or state.terminated.reason or "").strip()
        if state.waiting is not None:
            return f"{state.waiting.reason}: {state.waiting.message or ''}".strip(": ")
    unmet = [item.message for item in pod.status.conditions or () if item.status != "True" and item.message]
    return unmet[0] if unmet else "no reason given"


NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where Kubernetes tells a pod in which namespace it runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightRecord:
    """What a preflight found."""

    cluster: str
    namespace: str
    findings: tuple[Finding, ...]

    @property
    def table(self) -> str:
        """Plain text, what is missing first."""
        return findings_table(self.findings)


def preflight(profile: ClusterProfile, *, root: Path, timeout_s: float) -> PreflightRecord:
    """Ask the cluster that this pod runs in.

    Raises:
        ConfigError: this is no pod with a service account's token; or the profile is of this machine.
    """
    namespace = own_namespace()
    return check_inside(profile, connect(context=None, timeout_s=timeout_s), namespace=namespace, root=root)


def own_namespace(path: Path = NAMESPACE_FILE) -> str:
    """The namespace of this pod.

    Raises:
        ConfigError: no token of a service account is mounted here.
    """
    require(path.is_file(), "preflight", "must run in a pod with a service account's token", f"no {path}")
    return path.read_text().strip()


def check_inside(profile: ClusterProfile, api: Api, *, namespace: str, root: Path) -> PreflightRecord:
    """Ask all that `slipstream preflight` asks, but for what this pod knows better.

    What the caller may do is not asked, for Flyte and KubeRay make the pods of a run, not this pod's account; and
    whether `root` can be written to is tried here, as the user and group of every task, without another pod.
    """
    needs = replace(needs_of(profile, namespace=namespace, image=None), permissions=(), own_root=root)
    return PreflightRecord(cluster=profile.name, namespace=namespace, findings=tuple(check(api, needs)))


def require_ready(record: PreflightRecord) -> None:
    """Refuse a cluster that lacks something.

    Raises:
        ConfigError: with the table.
    """
    missing = num_missing(record.findings)
    if missing:
        raise ConfigError(f"cluster {record.cluster} lacks {missing} of what its runs need:\n{record.table}")
