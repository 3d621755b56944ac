"""What the namespace allows: rights, quota, and what admission says to the pods themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubernetes import client as k8s
from kubernetes.utils.quantity import parse_quantity

from slipstream.kubernetes.preflight.api import Api, Refusal
from slipstream.kubernetes.preflight.needs import Finding, Permission, State


def check_permissions(api: Api, namespace: str, permissions: tuple[Permission, ...]) -> list[Finding]:
    """A row for each right that the caller lacks; one row in all if it has every one."""
    rows = [row for permission in permissions if (row := _lacking(api, namespace, permission)) is not None]
    wanted = f"{len(permissions)} rights in {namespace}"
    return rows or [Finding(what="rights", found=wanted, needed=wanted, state=State.FINE)]


def _lacking(api: Api, namespace: str, permission: Permission) -> Finding | None:
    asked = k8s.V1ResourceAttributes(
        namespace=namespace, verb=permission.verb, group=permission.group, resource=permission.resource
    )
    review = k8s.V1SelfSubjectAccessReview(spec=k8s.V1SelfSubjectAccessReviewSpec(resource_attributes=asked))
    answer = api.ask(k8s.AuthorizationV1Api(api.client).create_self_subject_access_review, review)
    what, needed = f"right to {permission}", "allowed"
    if isinstance(answer, Refusal):
        return answer.finding(what, needed=needed, right="create selfsubjectaccessreviews", absent="")
    if answer.status.allowed:
        return None
    found = f"denied{f': {answer.status.reason}' if answer.status.reason else ''}"
    fix = f"bind a role with it in namespace {namespace}: deploy/ has one"
    return Finding(what=what, found=found, needed=needed, state=State.MISSING, fix=fix)


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


def check_pods(api: Api, namespace: str, pods: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """A server-side dry run of each pod: its schema, defaults and every admission plugin; nothing is created."""
    return [_dry_run(api, namespace, role, manifest) for role, manifest in pods.items()]


def _dry_run(api: Api, namespace: str, role: str, manifest: Mapping[str, Any]) -> Finding:
    answer = api.ask(k8s.CoreV1Api(api.client).create_namespaced_pod, namespace, manifest, dry_run="All")
    what, needed = f"pod {role}, dry run", "admitted"
    if not isinstance(answer, Refusal):
        return Finding(what=what, found="admitted", needed=needed, state=State.FINE)
    if answer.status in (400, 403, 422):
        # An admission plugin refuses with 403 as well: its sentence says which rule the pod breaks.
        fix = "change the cluster profile, or the policy that refuses the pod"
        return Finding(what=what, found=answer.reason, needed=needed, state=State.MISSING, fix=fix)
    return answer.finding(what, needed=needed, right="create pods", absent=f"create the namespace {namespace}")
