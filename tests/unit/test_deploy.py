"""What deploy/ ships is what the profiles name, and what Kubernetes and the drivers take."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes.client import ApiClient

from slipstream.kubernetes import pods
from slipstream.kubernetes.preflight import run_quota
from slipstream.kubernetes.profile import CLUSTERS, read_profile
from slipstream.study.variants import MAX_VARIANTS
from tasks.resources import TRAINING

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCHEMAS = Path(__file__).with_name("schemas")
OF_KUBERNETES = {"v1", "networking.k8s.io/v1", "admissionregistration.k8s.io/v1", "rbac.authorization.k8s.io/v1"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def folder(name: str) -> list[dict[str, Any]]:
    """The objects of a kustomization, those of the folders that it names too."""
    directory = DEPLOY / name
    (kustomization,) = documents(directory / "kustomization.yaml")
    found: list[dict[str, Any]] = []
    for resource in kustomization["resources"]:
        path = (directory / resource).resolve()
        found += folder(str(path.relative_to(DEPLOY))) if path.is_dir() else documents(path)
    return found


def names(objects: list[dict[str, Any]], kind: str) -> set[str]:
    return {item["metadata"]["name"] for item in objects if item["kind"] == kind}


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [item for item in objects if item["kind"] == kind]
    return found


MERGED = {"manager_config.yaml"}  # a part of another program's configuration
FOLDERS = sorted(path.parent.name for path in DEPLOY.glob("*/kustomization.yaml"))


def test_every_file_belongs_to_a_kustomization_but_the_examples_which_are_secrets_without_content() -> None:
    assert FOLDERS == ["base", "gb200", "h200", "kueue", "old_propeller", "preflight", "ray_token"]
    for name in FOLDERS:
        (kustomization,) = documents(DEPLOY / name / "kustomization.yaml")
        listed = {item for item in kustomization["resources"] if item.endswith(".yaml")}
        assert listed == {path.name for path in (DEPLOY / name).glob("*.yaml")} - {"kustomization.yaml", *MERGED}
    for secret in documents(DEPLOY / "examples" / "secrets.yaml"):
        kubernetes_validate.validate(secret, "1.37", strict=True)
        assert all(value.startswith(("<", "https://<")) for value in secret["stringData"].values())


@pytest.mark.parametrize("name", sorted({*FOLDERS} - {"kueue"}))
def test_kubernetes_takes_its_own_kinds(name: str) -> None:
    objects = [item for item in folder(name) if item["apiVersion"] in OF_KUBERNETES]
    assert objects
    for item in objects:
        kubernetes_validate.validate(item, "1.37", strict=True)


def test_gb200_gets_a_domain_that_the_driver_takes_a_shared_volume_and_an_account_bound_to_nothing() -> None:
    objects = folder("gb200")
    assert sorted(item["kind"] for item in objects if item["kind"] != "NetworkPolicy") == [
        *("ComputeDomain", "LocalQueue", "PersistentVolumeClaim", "ServiceAccount")
    ]
    domain, profile = only(objects, "ComputeDomain"), read_profile("gb200")
    jsonschema.validate(domain, json.loads((SCHEMAS / "compute_domain.json").read_text()))
    assert profile.gpu is not None
    assert domain["spec"]["channel"]["resourceClaimTemplate"]["name"] == profile.gpu.channel_claim_template
    assert only(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    assert only(objects, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("name", ["cpu", "gb200", "h200"])
def test_what_a_profile_names_is_shipped(name: str) -> None:
    profile = read_profile(name)
    objects = folder("base" if name == "cpu" else name)
    assert profile.storage is not None and profile.tracking is not None and profile.object_store is not None
    assert names(objects, "PersistentVolumeClaim") == {profile.storage.claim}
    assert names(objects, "ServiceAccount") == {profile.service_account}
    wanted = {profile.tracking.secret, profile.object_store.secret, profile.ray_token_secret} - {None}
    assert wanted <= names(documents(DEPLOY / "examples" / "secrets.yaml"), "Secret")
    if profile.queue is not None:
        kind = {"kueue": "LocalQueue", "volcano": "Queue"}[profile.queue.scheduler]
        assert names(objects, kind) == {profile.queue.name}


def test_a_preflight_may_look_at_what_it_asks_for_and_change_nothing() -> None:
    """A right that a check needs, and that no rule gives, would be a row that is MISSING on every cluster."""
    objects = folder("preflight")
    assert names(objects, "ServiceAccount") == {pods.PREFLIGHT_ACCOUNT}
    rules = [(item["kind"], rule) for item in objects for rule in item.get("rules", [])]
    rights = {(kind, verb, of) for kind, rule in rules for verb in rule["verbs"] for of in rule["resources"]}
    gets = ("persistentvolumeclaims", "serviceaccounts", "secrets", "resourceclaimtemplates", "localqueues")
    everywhere = (
        "storageclasses",
        "customresourcedefinitions",
        "queues",
        "configmaps",
    )  # the last of Kueue, by its name
    assert rights == {
        *(("Role", "get", resource) for resource in gets),
        *(("ClusterRole", "get", resource) for resource in everywhere),
        *(("ClusterRole", "list", "nodes"), ("Role", "list", "resourcequotas")),
        ("Role", "create", "pods"),  # of a dry run
    }
    named, kueue = (rule["resourceNames"] for _, rule in rules if "resourceNames" in rule)
    assert kueue == ["kueue-manager-config"]
    profile = read_profile("gb200")
    assert profile.tracking is not None and profile.object_store is not None
    assert set(named) == {profile.tracking.secret, profile.object_store.secret, profile.ray_token_secret}
    for binding in (item for item in objects if item["kind"].endswith("Binding")):
        assert [subject["name"] for subject in binding["subjects"]] == [pods.PREFLIGHT_ACCOUNT]


def test_rays_ports_are_open_to_its_own_pods_and_to_the_operators_poll_alone() -> None:
    policies = {item["metadata"]["name"]: item["spec"] for item in folder("base") if item["kind"] == "NetworkPolicy"}
    ray = policies["slipstream-ray"]
    assert ray["podSelector"]["matchLabels"] == pods.labels("ray")
    own, operator = ray["ingress"]
    assert own["from"] == [{"podSelector": {"matchLabels": pods.labels("ray")}}]
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]
    assert policies["slipstream-cpu"]["podSelector"]["matchLabels"] == pods.labels("cpu")
    assert "ingress" not in policies["slipstream-cpu"]


def test_the_operator_is_given_the_secret_that_the_pods_ask_with() -> None:
    policy = only(folder("ray_token"), "MutatingAdmissionPolicy")
    expression = policy["spec"]["mutations"][0]["applyConfiguration"]["expression"]
    secret = read_profile("gb200").ray_token_secret
    assert f'authOptions{{mode: "token", secretName: "{secret}"}}' in expression
    lock = (ROOT / "requirements" / "gpu.lock").read_text()
    version = next(line.removeprefix("ray==") for line in lock.splitlines() if line.startswith("ray=="))
    assert f'rayVersion: "{version}"' in expression


def test_an_old_propeller_is_repaired_with_what_the_workers_ask_for() -> None:
    policy = only(folder("old_propeller"), "MutatingAdmissionPolicy")
    expression = policy["spec"]["mutations"][0]["jsonPatch"]["expression"]
    spec: Any = ApiClient().sanitize_for_serialization(pods.worker_overlay(read_profile("gb200")))
    (claim,) = spec["resourceClaims"]
    (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    named = [*claim.values(), term["topologyKey"], *term["matchLabelKeys"], *term["labelSelector"]["matchLabels"]]
    assert len(named) == 5
    for value in named:
        assert f'"{value}"' in expression


def test_kueue_has_room_for_one_job_of_the_profile_and_knows_its_workers_claims() -> None:
    profile = read_profile("gb200")
    assert profile.gpu is not None and profile.head is not None
    objects = {item["kind"]: item for item in folder("kueue")}
    local = only(folder("gb200"), "LocalQueue")
    assert local["spec"]["clusterQueue"] == objects["ClusterQueue"]["metadata"]["name"]
    assert {local["apiVersion"], *(item["apiVersion"] for item in objects.values())} == {"kueue.x-k8s.io/v1beta2"}
    (group,) = objects["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == objects["ResourceFlavor"]["metadata"]["name"]
    assert objects["ResourceFlavor"]["spec"]["nodeLabels"] == {"kubernetes.io/arch": profile.gpu.architecture.value}
    quota = {each["name"]: str(each["nominalQuota"]) for each in flavor["resources"]}
    assert list(quota) == group["coveredResources"]
    (config,) = documents(DEPLOY / "kueue" / "manager_config.yaml")
    (mapping,) = config["resources"]["deviceClassMappings"]
    needed = {name: amount for name, amount in run_quota(profile).items() if name != "pods"}
    assert quota == {**needed, mapping["name"]: str(profile.gpu.nodes)}


def test_flyte_is_installed_with_room_for_every_part_of_an_ablation_and_with_rights_to_ray_jobs() -> None:
    (values,) = documents(DEPLOY / "flyte" / "values.yaml")
    inline = values["configuration"]["inline"]
    hours = int(inline["propeller"]["array-node-config"]["max-delta-timestamp"].removesuffix("h"))
    assert hours * 3600 >= MAX_VARIANTS * TRAINING.total_seconds()
    assert "ray" in values["enabled_plugins"]["tasks"]["task-plugins"]["enabled-plugins"]
    (rule,) = values["rbac"]["extraRules"]
    given = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
    assert {"ray.io", "rayjobs", "create", "delete", "watch"} <= given
    (template,) = values["clusterResourceTemplates"]["inline"].values()
    namespace = yaml.safe_load(template.replace("{{ namespace }}", "slipstream-development"))
    kubernetes_validate.validate(namespace, "1.37", strict=True)
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"  # IPC_LOCK


def registered(venv: Path, cluster: str, pyflyte: str) -> subprocess.CompletedProcess[str]:
    """Run `make register` without an image for GPUs, with a shell script as pyflyte."""
    (venv / "bin").mkdir()
    for name, script in (("python", f'exec {sys.executable} "$@"'), ("pyflyte", pyflyte)):
        (venv / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (venv / "bin" / name).chmod(0o755)
    given = {"VENV": str(venv), "IMAGE_CPU": "cpu:v1", "FLYTE_CONFIG": "config.yaml", "VERSION": "v1"}
    environment = {name: value for name, value in os.environ.items() if name != "IMAGE_GPU"} | given
    command = ["bash", str(ROOT / "scripts" / "register.sh"), cluster]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_flyte_with_stock_limits_refuses_and_the_registration_says_what_to_change(tmp_path: Path) -> None:
    refusal = "Requested CPU limit [4] is greater than current limit set in the platform configuration [2]"
    found = registered(tmp_path, "cpu", f'case "$*" in *package*) ;; *) echo "{refusal}"; exit 1 ;; esac')
    assert found.returncode == 1
    assert refusal in found.stdout
    assert "task_resources.limits must be 0" in found.stderr and "docs/deploy.md, section 2" in found.stderr


def test_a_profile_without_gpus_needs_no_image_for_them_whatever_its_name(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text((CLUSTERS / "cpu.yaml").read_text().replace("name: cpu", "name: mine"))
    assert registered(tmp_path, str(profile), 'echo "$*"').returncode == 0
    (tmp_path / "gpus").mkdir()
    refused = registered(tmp_path / "gpus", "gb200", 'echo "$*"')
    assert refused.returncode != 0 and "set IMAGE_GPU" in refused.stderr
