"""What must have been installed: the shared volume, custom resources, secrets, the service account."""

from __future__ import annotations

from typing import Any

from kubernetes import client as k8s

from slipstream.kubernetes.preflight.api import Api, Refusal
from slipstream.kubernetes.preflight.needs import CrdNeed, Finding, SecretNeed, State

_SHARED = "ReadWriteMany"
_DRA = "resource.k8s.io"


def check_claim(api: Api, namespace: str, claim: str) -> list[Finding]:
    """The claim is bound, or waits for its first pod, and every node can write to it; its storage class exists."""
    what, needed = f"volume claim {claim}", f"Bound, {_SHARED}"
    fix = f"create it in namespace {namespace}: deploy/ has one to adapt"
    answer = api.ask(k8s.CoreV1Api(api.client).read_namespaced_persistent_volume_claim, claim, namespace)
    if isinstance(answer, Refusal):
        return [answer.finding(what, needed=needed, right="get persistentvolumeclaims", absent=fix)]
    phase, modes, class_name = answer.status.phase, answer.spec.access_modes or [], answer.spec.storage_class_name
    storage_class = None if class_name is None else api.ask(k8s.StorageV1Api(api.client).read_storage_class, class_name)
    waits = (
        storage_class is not None
        and not isinstance(storage_class, Refusal)
        and storage_class.volume_binding_mode == "WaitForFirstConsumer"
    )
    is_fine = _SHARED in modes and (phase == "Bound" or (phase == "Pending" and waits))
    wrong = "kubectl describe pvc says why it is not bound" if _SHARED in modes else f"it needs the mode {_SHARED}"
    found = f"{phase}, {', '.join(modes)}{', waits for its first pod' if phase == 'Pending' and waits else ''}"
    rows = [Finding.of(what, found=found, needed=needed, is_fine=is_fine, fix=wrong)]
    if class_name is not None:
        rows.append(_class_row(class_name, storage_class, is_bound=phase == "Bound"))
    return rows


def _class_row(name: str, answer: Any, *, is_bound: bool) -> Finding:
    what, needed = f"storage class {name}", "present"
    if isinstance(answer, Refusal):
        if is_bound and not answer.is_absent:  # storage classes belong to the cluster: few accounts may see them
            return Finding(
                what=what, found=answer.reason, needed=needed, state=State.UNCHECKED, fix="the claim is bound"
            )
        return answer.finding(what, needed=needed, right="get storageclasses", absent="name one of the cluster's own")
    provisioner = "" if answer is None else answer.provisioner
    return Finding(what=what, found=provisioner, needed=needed, state=State.FINE)


def check_crds(api: Api, crds: tuple[CrdNeed, ...]) -> list[Finding]:
    """Each custom resource is established and serves the version that is used."""
    return [_check_crd(api, crd) for crd in crds]


def _check_crd(api: Api, crd: CrdNeed) -> Finding:
    what, needed = f"custom resource {crd.name}", crd.version
    answer = api.ask(k8s.ApiextensionsV1Api(api.client).read_custom_resource_definition, crd.name)
    if isinstance(answer, Refusal):
        right = "get customresourcedefinitions"
        return answer.finding(what, needed=needed, right=right, absent=f"install {crd.provider}")
    served = [version.name for version in answer.spec.versions if version.served]
    conditions = {condition.type: condition.status for condition in (answer.status.conditions or ())}
    is_established = conditions.get("Established") == "True"
    found = ", ".join(served) + ("" if is_established else ", not established")
    is_fine = crd.version in served and is_established
    return Finding.of(
        what, found=found, needed=needed, is_fine=is_fine, fix=f"install another version of {crd.provider}"
    )


def check_claim_template(api: Api, namespace: str, name: str) -> list[Finding]:
    """The template of the ComputeDomain's channel, in whichever version of the API the cluster prefers."""
    what, needed = f"claim template {name}", "present"
    groups = api.ask(k8s.ApisApi(api.client).get_api_versions)
    if isinstance(groups, Refusal):
        return [groups.finding(what, needed=needed, right="read the API's groups", absent="")]
    preferred = {group.name: group.preferred_version.version for group in groups.groups}
    if _DRA not in preferred:
        fix = "Kubernetes >= 1.32 with dynamic resource allocation, and NVIDIA's DRA driver"
        return [Finding(what=what, found=f"no API {_DRA}", needed=needed, state=State.MISSING, fix=fix)]
    answer = api.ask(
        k8s.CustomObjectsApi(api.client).get_namespaced_custom_object,
        _DRA,
        preferred[_DRA],
        namespace,
        "resourceclaimtemplates",
        name,
    )
    if isinstance(answer, Refusal):
        absent = "create the ComputeDomain of deploy/, which makes it"
        return [answer.finding(what, needed=needed, right="get resourceclaimtemplates", absent=absent)]
    return [Finding(what=what, found=f"{_DRA}/{preferred[_DRA]}", needed=needed, state=State.FINE)]


def check_secrets(api: Api, namespace: str, secrets: tuple[SecretNeed, ...]) -> list[Finding]:
    """Each secret exists and has its keys; no value is looked at."""
    return [_check_secret(api, namespace, secret) for secret in secrets]


def _check_secret(api: Api, namespace: str, secret: SecretNeed) -> Finding:
    what, needed = f"secret {secret.name}", f"keys {', '.join(secret.keys)}" if secret.keys else "present"
    answer = api.ask(k8s.CoreV1Api(api.client).read_namespaced_secret, secret.name, namespace)
    if isinstance(answer, Refusal):
        absent = f"create it in namespace {namespace}, in the shape that deploy/ shows"
        return answer.finding(what, needed=needed, right="get secrets", absent=absent)
    keys = sorted(answer.data or {})
    is_fine = bool(keys) and set(secret.keys) <= set(keys)
    fix = f"add the keys {', '.join(sorted(set(secret.keys) - set(keys)))}" if secret.keys else "it is empty: add keys"
    return Finding.of(what, found=f"keys {', '.join(keys) or 'none'}", needed=needed, is_fine=is_fine, fix=fix)


def check_service_account(api: Api, namespace: str, name: str) -> list[Finding]:
    """The account that the pods run as."""
    what = f"service account {name}"
    answer = api.ask(k8s.CoreV1Api(api.client).read_namespaced_service_account, name, namespace)
    if isinstance(answer, Refusal):
        absent = f"create it in namespace {namespace}: deploy/ has it"
        return [answer.finding(what, needed="present", right="get serviceaccounts", absent=absent)]
    return [Finding(what=what, found="present", needed="present", state=State.FINE)]
