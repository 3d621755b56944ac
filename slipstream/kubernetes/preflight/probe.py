"""What only a pod can tell: whether the user that tasks run as can write under the shared root."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes import client as k8s

from slipstream.kubernetes.preflight.api import Api, Refusal
from slipstream.kubernetes.preflight.needs import Finding, Needs, State

_EVERY_S = 1.0
_WHAT = "shared root"


def check_root(api: Api, needs: Needs, *, sleep: Callable[[float], None] = time.sleep) -> list[Finding]:
    """Start a pod that writes, reads back and removes one file; it is deleted whatever happens."""
    needed = f"{needs.mount_path} writable by user {needs.user}"
    if needs.probe_image is None:
        fix = "give --image to let a pod try"
        return [Finding(what=_WHAT, found="no pod was started", needed=needed, state=State.UNCHECKED, fix=fix)]
    core = k8s.CoreV1Api(api.client)
    created = api.ask(core.create_namespaced_pod, needs.namespace, probe_pod(needs))
    if isinstance(created, Refusal):
        return [created.finding(_WHAT, needed=needed, right="create pods", absent="create the namespace")]
    name = created.metadata.name
    try:
        found, is_fine = _wait(api, needs, name, sleep)
    finally:
        deleted = api.ask(core.delete_namespaced_pod, name, needs.namespace, grace_period_seconds=0)
    left = f"; pod {name} could not be deleted" if isinstance(deleted, Refusal) and not deleted.is_absent else ""
    fix = _fix(needs)
    return [Finding.of(_WHAT, found=f"{found}{left}", needed=needed, is_fine=is_fine and not left, fix=fix)]


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
    return [Finding.of(_WHAT, found=found, needed=needed, is_fine=is_fine, fix=_fix(needs))]


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
