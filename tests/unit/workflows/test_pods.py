"""The pods of every task on every cluster profile, as Flyte's propeller makes them of what is registered."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes.utils.quantity import parse_quantity

from tests.unit.workflows.registration import pods, ray_job, registered
from tests.unit.workflows.test_launch_plans import WITH_GPUS, on_pods

KUBERNETES = "1.37"

on_gpus = pytest.mark.parametrize("profile", ["gb200", "h200"])


def with_gpus(profile: str) -> list[dict[str, Any]]:
    return [task for name, task in registered(profile).tasks.items() if name in WITH_GPUS]


def ray_pods(profile: str) -> list[dict[str, dict[str, Any]]]:
    return [pods(task) for task in with_gpus(profile)]


def all_pods(profile: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Every pod with its task and its kind."""
    tasks = registered(profile).tasks
    return [(name, kind, pod) for name, task in tasks.items() for kind, pod in pods(task).items()]


def primary(pod: dict[str, Any]) -> dict[str, Any]:
    assert len(pod["spec"]["containers"]) == 1
    return pod["spec"]["containers"][0]


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in primary(pod)["env"]}


@on_pods
def test_kubernetes_takes_every_pod_and_no_list_names_a_thing_twice(profile: str) -> None:
    for _, _, pod in all_pods(profile):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        container = primary(pod)
        lists = (container["env"], container["volumeMounts"], pod["spec"]["volumes"])
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        for names in (paths, *([item["name"] for item in entries] for entries in lists)):
            assert len(set(names)) == len(names)


def refused(task: dict[str, Any], limits: dict[str, Any]) -> list[str]:
    """Resources for which flyteadmin refuses a task at registration, by the rule of `validateK8sPod`; 0 is no limit.

    Source: flyteadmin/pkg/manager/impl/validation/task_validator.go and pkg/runtime/task_resource_provider.go, 1.16.8.
    """
    names = {"cpu": "cpu", "memory": "memory", "gpu": "nvidia.com/gpu", "ephemeralStorage": "ephemeral-storage"}
    bounds = {names[name]: parse_quantity(limit) for name, limit in limits.items()}
    asked = [container["resources"]["limits"] for container in task["k8sPod"]["podSpec"]["containers"]]
    return [
        name
        for amounts in asked
        for name, amount in amounts.items()
        if bounds.get(name) and parse_quantity(amount) > bounds[name]
    ]


@on_pods
def test_flyte_as_deploy_installs_it_takes_all_tasks_and_as_it_comes_none(profile: str) -> None:
    values = yaml.safe_load((Path(__file__).parents[3] / "deploy" / "flyte" / "values.yaml").read_text())
    limits = values["configuration"]["inline"]["task_resources"]["limits"]
    for name, task in registered(profile).tasks.items():
        assert refused(task, {"cpu": "2", "memory": "1Gi", "gpu": "1"}), name
        assert refused(task, limits) == [], name


@on_gpus
def test_kuberay_takes_every_ray_job(profile: str) -> None:
    schema = json.loads((Path(__file__).parents[1] / "schemas" / "ray_job.json").read_text())
    for task in with_gpus(profile):
        jsonschema.validate(ray_job(task), schema)


@on_pods
def test_nothing_runs_as_root_and_the_preflight_alone_has_a_token(profile: str) -> None:
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    group = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    for name, kind, pod in all_pods(profile):
        spec, asks = pod["spec"], name == "preflight"
        assert spec["securityContext"] == user | group
        assert spec["automountServiceAccountToken"] is asks
        assert spec["serviceAccountName"] == ("slipstream-preflight" if asks else "slipstream")
        capabilities = {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if kind == "ray-worker" else {})}
        assert primary(pod)["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": capabilities}


@on_pods
def test_every_pod_has_the_shared_volume_and_the_tasks_own_credentials(profile: str) -> None:
    servers = [{"secretRef": {"name": "slipstream-mlflow"}}, {"secretRef": {"name": "slipstream-object-store"}}]
    for _, kind, pod in all_pods(profile):
        claims = [volume for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
        assert claims == [{"name": "runs", "persistentVolumeClaim": {"claimName": "slipstream-runs"}}]
        assert {"name": "runs", "mountPath": "/mnt/slipstream"} in primary(pod)["volumeMounts"]
        given = environment(pod)
        assert (given["SLIPSTREAM_CLUSTER"], given["HF_HOME"]) == (profile, "/mnt/slipstream/hub")
        assert given["SLIPSTREAM_NODE"]["fieldRef"]["fieldPath"] == "spec.nodeName"
        assert primary(pod).get("envFrom", []) == (servers if kind in ("task", "ray-head") else [])


@on_gpus
def test_only_tasks_that_generate_or_train_make_ray_clusters(profile: str) -> None:
    kinds = {name: task["type"] for name, task in registered(profile).tasks.items()}
    assert {name for name, kind in kinds.items() if kind == "ray"} == WITH_GPUS
    assert set(kinds.values()) == {"ray", "python-task"}
    assert all(task["type"] == "python-task" for task in registered("cpu").tasks.values())


@on_gpus
def test_a_ray_cluster_fits_the_profile_and_goes_when_its_task_is_done(profile: str) -> None:
    nodes, gpus = {"gb200": (8, "4"), "h200": (1, "8")}[profile]
    for task in with_gpus(profile):
        custom, made = task["custom"], pods(task)
        assert custom["shutdownAfterJobFinishes"] is True
        assert custom.get("ttlSecondsAfterFinished", 0) == 0  # a finished job would keep its GPUs so long
        (group,) = custom["rayCluster"]["workerGroupSpec"]
        assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (nodes, nodes, nodes)
        assert group["rayStartParams"] == {"num-gpus": gpus}
        head = custom["rayCluster"]["headGroupSpec"]["rayStartParams"]
        assert (head["num-gpus"], head["num-cpus"]) == ("0", "0")
        assert tuple(made) == ("submitter", "ray-head", "ray-worker")
        for kind in ("submitter", "ray-head"):
            resources = primary(made[kind])["resources"]
            assert "nvidia.com/gpu" not in {**resources["requests"], **resources["limits"]}


def test_the_pods_of_a_gb200_job_have_these_resources() -> None:
    for made in ray_pods("gb200"):
        sizes = {kind: primary(pod)["resources"] for kind, pod in made.items()}
        amounts = {
            "submitter": {"cpu": "1", "memory": "4Gi", "ephemeral-storage": "4Gi"},
            "ray-head": {"cpu": "8", "memory": "48Gi", "ephemeral-storage": "200Gi"},
            "ray-worker": {"cpu": "120", "memory": "720Gi", "ephemeral-storage": "500Gi", "nvidia.com/gpu": "4"},
        }
        for kind, wanted in amounts.items():
            assert sizes[kind]["requests"] == sizes[kind]["limits"] == wanted
        assert sizes["ray-worker"]["claims"] == [{"name": "compute-domain-channel"}]


def test_gb200_workers_lie_in_one_clique_with_a_channel_of_the_compute_domain() -> None:
    near = {
        "topologyKey": "nvidia.com/gpu.clique",
        "labelSelector": {"matchLabels": {"ray.io/node-type": "worker"}},
        "matchLabelKeys": ["ray.io/cluster"],
    }
    channel = {"name": "compute-domain-channel", "resourceClaimTemplateName": "slipstream-channel"}
    for made in ray_pods("gb200"):
        spec = made["ray-worker"]["spec"]
        assert spec["nodeSelector"] == {"kubernetes.io/arch": "arm64", "nvidia.com/gpu.product": "NVIDIA-GB200"}
        assert spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == [near]
        assert spec["resourceClaims"] == [channel]
        assert environment(made["ray-worker"])["NCCL_MNNVL_ENABLE"] == "1"
        for kind in ("submitter", "ray-head"):
            assert made[kind]["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
            assert not {"resourceClaims", "affinity"} & made[kind]["spec"].keys()


def test_h200_workers_ask_for_their_product_and_for_no_channel() -> None:
    for made in ray_pods("h200"):
        spec = made["ray-worker"]["spec"]
        assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64", "nvidia.com/gpu.product": "NVIDIA-H200"}
        assert not {"resourceClaims", "affinity"} & spec.keys()
        assert "NCCL_MNNVL_ENABLE" not in environment(made["ray-worker"])


def test_pods_tolerate_the_taints_of_their_nodes_and_queues_find_their_label_on_the_job() -> None:
    anything = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    arm = {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}
    ours = {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/component": "ray"}
    for profile, taints, queue in (("gb200", [anything, arm], "kueue.x-k8s.io"), ("h200", [anything], "volcano.sh")):
        for task in with_gpus(profile):
            assert all(pod["spec"]["tolerations"] == taints for pod in pods(task).values())
            assert task["k8sPod"]["metadata"]["labels"] == ours | {f"{queue}/queue-name": "slipstream"}


@on_pods
def test_pods_without_gpus_leave_nodes_with_gpus_to_workers(profile: str) -> None:
    for _, kind, pod in all_pods(profile):
        away = pod["spec"].get("affinity", {}).get("nodeAffinity")
        assert (away is not None) is (kind == "task" and profile in ("gb200", "h200"))


@pytest.mark.parametrize(
    ("profile", "sizes"),
    [
        ("gb200", {"ray-worker": "200Gi", "ray-head": "16Gi"}),
        ("h200", {"ray-worker": "400Gi"}),
        ("cpu", {"task": "4Gi"}),
    ],
)
def test_shared_memory_is_memory_and_not_64_mib(profile: str, sizes: dict[str, str]) -> None:
    for _, kind, pod in all_pods(profile):
        if kind in sizes:
            memory = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": sizes[kind]}}
            assert memory in pod["spec"]["volumes"]
            assert {"name": "shm", "mountPath": "/dev/shm"} in primary(pod)["volumeMounts"]


@on_gpus
def test_ray_asks_for_a_token_from_a_secret_in_every_pod(profile: str) -> None:
    secret = {"secretKeyRef": {"name": "slipstream-ray", "key": "auth_token"}}
    for made in ray_pods(profile):
        for pod in made.values():
            assert {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secret}.items() <= environment(pod).items()


@on_pods
def test_resources_stand_in_templates_alone(profile: str) -> None:
    for task in registered(profile).tasks.values():
        assert "container" not in task  # requests beside a template would replace what the template asks for
        assert task["config"] == {"primary_container_name": "primary"}
