"""Every launch plan on every cluster profile, as it is sent to Flyte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.cluster.profile import CLUSTERS, read_profile
from tests.unit.workflows.conftest import Registered

PROFILES = sorted(path.stem for path in CLUSTERS.glob("*.yaml"))
ON_PODS = [name for name in PROFILES if name != "local"]
WITH_GPUS = {
    "pretrain_draft",
    "tune_draft_length",
    "train_grpo",
    "evaluate_aime",
    "certify_losslessness",
    "certify_draft",
}

profiles = pytest.mark.parametrize("profile", PROFILES)
on_pods = pytest.mark.parametrize("profile", ON_PODS)


def inputs(entity: dict[str, Any]) -> dict[str, Any]:
    return entity["interface"]["inputs"]["variables"]


def test_the_profiles_are_those_that_the_documents_name() -> None:
    assert PROFILES == ["cpu", "gb200", "h200", "local"]


@profiles
def test_these_plans_are_registered_and_fix_recipe_and_workload(registered: Registered, profile: str) -> None:
    plans = registered(profile).plans
    assert set(plans) == {
        "tiny-smoke",
        "rl-zero-8b",
        "rl-think-8b",
        "rl-think-8b-async",
        "certify",
        "projection",
        "preflight",
    }

    def fixed(name: str) -> dict[str, Any]:
        literals = plans[name]["spec"].get("fixedInputs", {}).get("literals", {})
        return {
            key: next(iter(value["scalar"]["primitive"].values()))
            for key, value in literals.items()
            if "scalar" in value
        }

    eight = "qwen3_8b_h200" if profile == "h200" else "qwen3_8b"
    assert fixed("tiny-smoke") == {"recipe": "tiny"}
    assert fixed("rl-zero-8b") == {"recipe": eight, "workload": "rl_zero"}
    assert fixed("rl-think-8b") == {"recipe": eight, "workload": "rl_think"}
    assert fixed("rl-think-8b-async") == {"recipe": eight, "workload": "rl_think", "max_off_policy_steps": "1"}
    assert fixed("certify") == fixed("projection") == fixed("preflight") == {}


@profiles
def test_launch_forms_are_flat_and_every_input_is_described(registered: Registered, profile: str) -> None:
    workflows = registered(profile).workflows
    assert set(workflows) == {"speculative_rl", "certify", "projection", "preflight"}
    for workflow in workflows.values():
        for name, variable in inputs(workflow).items():
            kind = variable["type"]
            is_list_of_text = kind.get("collectionType") == {"simple": "STRING"}
            is_flat = kind.get("simple") in ("STRING", "INTEGER", "FLOAT", "BOOLEAN") or "enumType" in kind
            assert is_flat or is_list_of_text or "blob" in kind, name
            assert len(variable["description"].split()) > 3, name


@profiles
def test_outputs_and_nodes_have_names_of_their_own(registered: Registered, profile: str) -> None:
    found = registered(profile)
    for entity in [*found.workflows.values(), *found.tasks.values()]:
        assert not [name for name in entity["interface"]["outputs"].get("variables", {}) if name.startswith("o")]
    nodes = [node for node in found.workflows["speculative_rl"]["nodes"] if "taskNode" in node]
    assert [node["id"] for node in nodes if node["id"].startswith(("train", "evaluate"))] == [
        "train-autoregressive",
        "train-speculative",
        "evaluate-start",
        "evaluate-autoregressive",
        "evaluate-speculative",
    ]
    names = [node["metadata"]["name"] for node in nodes]
    assert len(set(names)) == len(names) == 15
    assert "train speculative" in names


@profiles
def test_a_failed_arm_does_not_end_the_other(registered: Registered, profile: str) -> None:
    for name in ("speculative_rl", "certify"):
        policy = registered(profile).workflows[name]["metadata"]["onFailure"]
        assert policy == "FAIL_AFTER_EXECUTABLE_NODES_COMPLETE"


@profiles
def test_time_outs_go_by_what_a_task_does(registered: Registered, profile: str) -> None:
    seconds = {name: task["metadata"]["timeout"] for name, task in registered(profile).tasks.items()}
    checking, preparing, measuring, training = "1800s", "43200s", "86400s", "604800s"
    assert seconds == {
        "start_run": checking,
        "fail_run": checking,
        "fail_certificate": checking,
        "preflight": checking,
        "require_ready": checking,
        "require_lossless": checking,
        "require_no_drift": checking,
        "project_speedup": checking,
        "project_request": checking,
        "report_speedup": checking,
        "prepare_data": preparing,
        "prepare_data_for": preparing,
        "prepare_policy": preparing,
        "pretrain_draft": measuring,
        "tune_draft_length": measuring,
        "evaluate_aime": measuring,
        "certify_losslessness": measuring,
        "certify_draft": measuring,
        "train_grpo": training,
    }


@profiles
def test_images_go_by_role(registered: Registered, profile: str) -> None:
    for name, task in registered(profile).tasks.items():
        container = task["container"] if profile == "local" else task["k8sPod"]["podSpec"]["containers"][0]
        takes_gpus = name in WITH_GPUS and profile in ("gb200", "h200")
        assert container["image"] == f"registry.example/slipstream-{'gpu' if takes_gpus else 'cpu'}:v1", name


def test_on_one_machine_tasks_are_plain_containers_without_pods_or_ray(registered: Registered) -> None:
    for task in registered("local").tasks.values():
        assert task["type"] == "python-task"
        assert "k8sPod" not in task
        assert task["container"]["resources"]["requests"] == [
            {"name": "CPU", "value": "2"},
            {"name": "MEMORY", "value": "12Gi"},
        ]


@on_pods
def test_executions_run_as_the_service_account_and_write_to_the_object_store(
    registered: Registered, profile: str
) -> None:
    for name, plan in registered(profile).plans.items():
        account = "slipstream-preflight" if name == "preflight" else "slipstream"
        assert plan["spec"]["securityContext"]["runAs"] == {"k8sServiceAccount": account}, name
        assert plan["spec"]["rawOutputDataConfig"] == {"outputLocationPrefix": "s3://slipstream/flyte"}, name


@profiles
def test_the_root_is_by_default_one_that_the_profile_shares(registered: Registered, profile: str) -> None:
    parameters = registered(profile).plans["rl-zero-8b"]["spec"]["defaultInputs"]["parameters"]
    root = parameters["run_root"]["default"]["scalar"]["primitive"]["stringValue"]
    assert root == ("runs" if profile == "local" else "/mnt/slipstream/runs")
    assert root == read_profile(profile).run_root


def test_a_role_without_an_image_ends_the_registration(tmp_path: Path) -> None:
    pyflyte = str(Path(sys.executable).with_name("pyflyte"))
    command = [pyflyte, "--pkgs", "workflows", "package", "--output", str(tmp_path / "p.tgz")]
    found = subprocess.run(
        [*command, "--image", "cpu=registry.example/slipstream-cpu:v1"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "SLIPSTREAM_CLUSTER": "gb200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode != 0
    assert "Image Config with name gpu not found" in found.stdout + found.stderr
    assert not (tmp_path / "p.tgz").exists()
