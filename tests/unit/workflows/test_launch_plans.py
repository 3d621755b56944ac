"""Every launch plan on every cluster profile, as it is sent to Flyte."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.kubernetes.profile import CLUSTERS, read_profile
from tests.unit.workflows.conftest import Registered
from tests.unit.workflows.registration import registration, task_name

PROFILES = sorted(path.stem for path in CLUSTERS.glob("*.yaml"))
ON_PODS = [name for name in PROFILES if name != "local"]
MEASURES = ("pretrain_draft", "tune_draft_length", "evaluate_aime", "certify_losslessness", "certify_draft")
WITH_GPUS = {*MEASURES, "train_grpo", "make_part"}
IN_ARRAYS = ("make_policy", "make_part")
SCHEDULED = {
    "nightly-draft-length": "0 1 * * *",
    "weekly-draft-initialisation": "0 5 * * 6",
    "monthly-projection": "0 6 1 * *",
}

profiles = pytest.mark.parametrize("profile", PROFILES)
on_pods = pytest.mark.parametrize("profile", ON_PODS)


def inputs(entity: dict[str, Any]) -> dict[str, Any]:
    return entity["interface"]["inputs"]["variables"]


def test_the_profiles_are_those_that_the_documents_name() -> None:
    assert PROFILES == ["cpu", "gb200", "h200", "local"]


@profiles
def test_the_plans_are_registered_and_fix_recipe_and_workload(registered: Registered, profile: str) -> None:
    plans = registered(profile).plans
    own = {"tiny-smoke", "tiny-async", "train-8b", "rl-zero-8b", "rl-think-8b", "rl-think-8b-async"}
    assert set(plans) == {*own, "certify", "projection", "preflight", "ablation", *SCHEDULED}

    def fixed(name: str) -> dict[str, Any]:
        literals = plans[name]["spec"].get("fixedInputs", {}).get("literals", {})
        return {key: _plain(value) for key, value in literals.items() if "scalar" in value}

    eight = "qwen3_8b_h200" if profile == "h200" else "qwen3_8b"
    assert fixed("tiny-smoke") == {"recipe": "tiny"}
    assert fixed("tiny-async") == {"recipe": "tiny_async"}
    assert fixed("train-8b") == {"recipe": eight, "arms": "speculative"}
    assert fixed("rl-zero-8b") == {"recipe": eight, "workload": "rl_zero"}
    assert fixed("rl-think-8b") == {"recipe": eight, "workload": "rl_think"}
    assert fixed("rl-think-8b-async") == {"recipe": eight, "workload": "rl_think", "max_off_policy_steps": "1"}
    assert fixed("certify") == fixed("projection") == fixed("ablation") == fixed("preflight") == {}


@profiles
def test_launch_forms_are_flat_and_every_input_is_described(registered: Registered, profile: str) -> None:
    workflows = registered(profile).workflows
    assert set(workflows) == {"speculative_rl", "asynchronous_rl", "certify", "projection", "ablation", "preflight"}
    for workflow in workflows.values():
        for name, variable in inputs(workflow).items():
            kind = variable["type"].get("collectionType", variable["type"])
            if "unionType" in kind:  # an input that may be left out
                kind, nothing = kind["unionType"]["variants"]
                assert nothing["simple"] == "NONE"
            is_flat = kind.get("simple") in ("STRING", "INTEGER", "FLOAT", "BOOLEAN", "DATETIME") or "enumType" in kind
            assert is_flat or "blob" in kind, name
            assert len(variable["description"].split()) > 3, name


@profiles
def test_outputs_and_nodes_have_names_of_their_own(registered: Registered, profile: str) -> None:
    found = registered(profile)
    own = [task for name, task in found.tasks.items() if name not in IN_ARRAYS]  # flytekit names an array's output
    for entity in [*found.workflows.values(), *own]:
        assert not [name for name in entity["interface"]["outputs"].get("variables", {}) if name.startswith("o")]
    nodes = [node for node in found.workflows["speculative_rl"]["nodes"] if "taskNode" in node]
    assert [node["id"] for node in nodes if node["id"].startswith(("train", "evaluate"))] == [
        "train",
        "evaluate",
    ]
    names = [node["metadata"]["name"] for node in nodes]
    assert len(set(names)) == len(names) == 12
    assert "train" in names


@profiles
def test_an_asynchronous_run_trains_and_evaluates_every_arm_in_both_loops(registered: Registered, profile: str) -> None:
    nodes = {node["id"]: node for node in registered(profile).workflows["asynchronous_rl"]["nodes"]}
    upstream = {name: set(node.get("upstreamNodeIds", ())) for name, node in nodes.items()}
    trained = [name for name in nodes if name.startswith("train")]
    assert trained == ["train", "train-asynchronous"]
    assert {*trained, "evaluate"} <= upstream["report-speedup"]

    def bound(node: str, name: str) -> dict[str, Any]:
        return next(each["binding"] for each in nodes[node]["inputs"] if each["var"] == name)

    of_loops = [{"promise": {"nodeId": name, "var": "trained"}} for name in trained]
    assert bound("evaluate", "arms") == bound("report-speedup", "arms") == {"collection": {"bindings": of_loops}}
    assert bound("certify-losslessness", "trained") == of_loops[-1]
    names = [node["metadata"]["name"] for node in nodes.values() if "taskNode" in node]
    assert len(set(names)) == len(names)
    assert "train, asynchronous" in names


@profiles
@pytest.mark.parametrize("workflow", ["speculative_rl", "asynchronous_rl"])
def test_no_two_tasks_that_want_the_same_nodes_can_run_at_once(
    registered: Registered, profile: str, workflow: str
) -> None:
    nodes = {node["id"]: node for node in registered(profile).workflows[workflow]["nodes"]}
    reached: dict[str, set[str]] = {}  # all that come before a node

    def before(name: str) -> set[str]:
        if name not in reached:
            direct = {each for each in nodes[name].get("upstreamNodeIds", ()) if each != "start-node"}
            reached[name] = direct.union(*map(before, direct))
        return reached[name]

    wanting = {
        name
        for name, node in nodes.items()
        if node.get("taskNode", {}).get("referenceId", {}).get("name", "").rpartition(".")[2] in WITH_GPUS
    }
    assert {"train", "evaluate", "certify-losslessness"} <= wanting
    for one, other in combinations(sorted(wanting), 2):
        assert one in before(other) or other in before(one), f"{one} and {other} may ask for the same nodes at once"


@profiles
def test_time_outs_go_by_what_a_task_does(registered: Registered, profile: str) -> None:
    seconds = {name: task["metadata"]["timeout"] for name, task in registered(profile).tasks.items()}
    checking, preparing, measuring, training = "1800s", "43200s", "86400s", "1209600s"
    checks = {"preflight", "project_speedup", "project_request", "report_speedup", "plan_ablation", "rank_ablation"}
    checks |= {name for name in seconds if name.startswith(("start_", "fail_", "require_"))}
    prepares = ("prepare_data", "prepare_data_for", "prepare_policy", "make_policy")
    assert len(checks) == 13
    assert seconds == {
        **dict.fromkeys(checks, checking),
        **dict.fromkeys(prepares, preparing),
        **dict.fromkeys(MEASURES, measuring),
        **dict.fromkeys(("train_grpo", "make_part"), training),
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


@profiles
def test_parts_of_an_ablation_follow_one_another_and_one_that_fails_sinks_no_other(
    registered: Registered, profile: str
) -> None:
    workflow = registered(profile).workflows["ablation"]
    arrays = {node["id"]: node for node in workflow["nodes"] if "arrayNode" in node}
    assert {name: set(node["upstreamNodeIds"]) for name, node in arrays.items()} == {
        "policies": {"plan-ablation"},
        "drafts": {"plan-ablation", "policies"},
        "baselines": {"plan-ablation", "drafts"},
        "variants": {"plan-ablation", "baselines"},
    }
    for name, node in arrays.items():
        array = node["arrayNode"]
        assert (array["parallelism"], array["minSuccessRatio"]) == (read_profile(profile).parallel_parts, 0.001)
        task = task_name(array["node"]["taskNode"]["referenceId"]["name"])
        assert task == ("make_policy" if name == "policies" else "make_part")
        assert array["node"]["metadata"]["retries"] == {"retries": 2}
    # With MINIMAL_STATE, the default of the message, propeller would lose what a Ray job's plugin remembers.
    modes = {name: node["arrayNode"].get("executionMode", "MINIMAL_STATE") for name, node in arrays.items()}
    takes_gpus = profile in ("gb200", "h200")
    assert modes["policies"] == "MINIMAL_STATE"
    assert modes["variants"] == ("FULL_STATE" if takes_gpus else "MINIMAL_STATE")
    assert workflow["failureNode"]["taskNode"]["referenceId"]["name"].endswith("fail_ablation")


@profiles
def test_recurring_plans_run_once_at_a_time_and_know_when_they_were_started(
    registered: Registered, profile: str
) -> None:
    found = registered(profile)
    scheduled = {name: plan for name, plan in found.plans.items() if plan["spec"]["entityMetadata"].get("schedule")}
    assert set(scheduled) == set(SCHEDULED)
    for name, plan in scheduled.items():
        spec = plan["spec"]
        assert spec["entityMetadata"]["schedule"] == {
            "cronSchedule": {"schedule": SCHEDULED[name]},
            "kickoffTimeInputArg": "kickoff_time",
        }
        assert spec["concurrencyPolicy"] == {"max": 1, "behavior": "CONCURRENCY_LIMIT_BEHAVIOR_SKIP"}
        assert spec["entityMetadata"].get("notifications", []) == []
        assert plan["isActivated"] is False
        assert "kickoff_time" not in spec["fixedInputs"].get("literals", {})
        workflow = found.workflows[spec["workflowId"]["name"].rpartition(".")[2]]
        assert inputs(workflow)["kickoff_time"]["type"] == {"simple": "DATETIME"}
        assert "seeds" not in spec["fixedInputs"].get("literals", {})


@pytest.mark.parametrize("profile", ["gb200", "cpu"])
def test_the_recipe_takes_every_variant_of_a_recurring_ablation(registered: Registered, profile: str) -> None:
    from slipstream.drafts.config import DraftInit, DraftMethod
    from slipstream.study.variants import Grid, variant_recipes

    sizes = {}
    for name in ("nightly-draft-length", "weekly-draft-initialisation"):
        fixed = registered(profile).plans[name]["spec"]["fixedInputs"]["literals"]
        given = {key: _plain(value) for key, value in fixed.items()}
        assert given["recipe"] == ("qwen3_8b" if profile == "gb200" else "tiny")
        grid = Grid(
            draft_inits=tuple(map(DraftInit, given.get("draft_inits", []))),
            methods=tuple(map(DraftMethod, given.get("methods", []))),
            draft_lengths=tuple(map(int, given["draft_lengths"])),
            seeds=(20779,),
        )
        found = variant_recipes(given["recipe"], grid, {})
        assert {recipe.grpo.seed for recipe, _ in found.values()} == {20779}
        sizes[name] = len(found)
    assert sizes == {"nightly-draft-length": 4, "weekly-draft-initialisation": 2}


def test_a_profile_says_whom_to_tell_and_whether_recurring_plans_are_active(tmp_path: Path) -> None:
    values = yaml.safe_load((CLUSTERS / "cpu.yaml").read_text())
    told = {"activate": True, "slack": ["runs@example.slack.com"], "email": ["team@example.com"]}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**values, "name": "mine", "parallel_parts": 3, "schedules": told}))
    found = registration(str(path), tmp_path / "mine.json")
    for name in SCHEDULED:
        assert found.plans[name]["isActivated"] is True
        slack, email = found.plans[name]["spec"]["entityMetadata"]["notifications"]
        assert slack["slack"] == {"recipientsEmail": ["runs@example.slack.com"]}
        assert set(slack["phases"]) == {"SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED"}
        assert email["email"] == {"recipientsEmail": ["team@example.com"]}
        assert set(email["phases"]) == {"FAILED", "TIMED_OUT", "ABORTED"}
    assert found.plans["ablation"]["isActivated"] is False
    arrays = [node["arrayNode"] for node in found.workflows["ablation"]["nodes"] if "arrayNode" in node]
    assert {array["parallelism"] for array in arrays} == {3}


def _plain(literal: dict[str, Any]) -> Any:
    if "collection" in literal:
        return [_plain(item) for item in literal["collection"]["literals"]]
    scalar = literal["scalar"]
    return _plain(scalar["union"]["value"]) if "union" in scalar else next(iter(scalar["primitive"].values()))


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
