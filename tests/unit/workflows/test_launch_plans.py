"""Every launch plan on every cluster profile, as it is sent to Flyte."""

import importlib
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from slipstream.kubernetes.profile import CLUSTERS, read_profile
from slipstream.types import ArmLoop, Workload
from tests.unit.workflows.registration import ROOT, edges, flat, registered, task_name

PROFILES = sorted(path.stem for path in CLUSTERS.glob("*.yaml"))
ON_PODS = [name for name in PROFILES if name != "local"]
MEASURES = ("pretrain_draft", "tune_draft_length", "evaluate_aime", "certify_losslessness", "certify_draft")
WITH_GPUS = {*MEASURES, "train_grpo", "make_part", "bake_off"}
NESTED = {"prepare", "train", "measure"}
WHOLE = {"speculative_rl", "asynchronous_rl", "bake_off", "certify", "projection", "ablation", "preflight"}
IN_ARRAYS = ("make_policy", "make_part")
SCHEDULED = {"nightly-draft-length": "0 1 * * *", "weekly-draft-initialisation": "0 5 * * 6"}
SCHEDULED |= {"monthly-projection": "0 6 1 * *"}

profiles = pytest.mark.parametrize("profile", PROFILES)
on_pods = pytest.mark.parametrize("profile", ON_PODS)


def inputs(entity: dict[str, Any]) -> dict[str, Any]:
    return entity["interface"]["inputs"]["variables"]


def fixed(plan: dict[str, Any]) -> dict[str, Any]:
    literals = plan["spec"].get("fixedInputs", {}).get("literals", {})
    return {key: _plain(value) for key, value in literals.items() if "scalar" in value}


@profiles
def test_a_profile_registers_each_workflow_and_what_its_nodes_can_run(profile: str) -> None:
    found, has_gpus = registered(profile), profile in ("gb200", "h200")
    own = {name: plan for name, plan in found.plans.items() if "." not in name}
    eight = {"recipe": "qwen3_8b_h200" if profile == "h200" else "qwen3_8b"}
    runs = {"tiny-smoke": {}, "tiny-async": {"recipe": "tiny_async"}, "tiny-train": {"arms": "speculative"}}
    runs = {name: {"recipe": "tiny", **values} for name, values in runs.items()}
    if has_gpus:
        workloads = {f"{name}-8b": {**eight, "workload": name.replace("-", "_")} for name in ("rl-zero", "rl-think")}
        runs = {"train-8b": {**eight, "arms": "speculative"}, **workloads}
    assert set(own) == {*runs, "certify", "projection", "preflight", "ablation", "bake-off", *SCHEDULED}
    assert {name: fixed(own[name]) for name in runs} == runs
    for name in ("certify", "ablation", "bake-off"):
        recipe = own[name]["spec"]["defaultInputs"]["parameters"]["recipe"]["default"]
        assert _plain(recipe) == (eight["recipe"] if has_gpus else "tiny"), name
    default = {name.rpartition(".")[2] for name in found.plans if "." in name}
    assert default == set(found.workflows) == WHOLE | NESTED


def test_every_plan_starts_from_the_command_line_with_no_further_words() -> None:
    for profile in ("cpu", "gb200"):
        found = registered(profile)
        for name, plan in found.plans.items():
            workflow = found.workflows[plan["spec"]["workflowId"]["name"].rpartition(".")[2]]
            parameters = plan["spec"].get("defaultInputs", {}).get("parameters", {})
            required = {key for key, value in parameters.items() if value.get("required")}
            if name == "certify":
                assert required == {"policy", "draft"}
                continue
            if name.rpartition(".")[2] in NESTED or name.endswith(".certify"):
                continue  # parts of others, and `certify` again
            assert required == set(), name
            fixed_names = plan["spec"].get("fixedInputs", {}).get("literals", {}).keys()
            assert set(_read(name, plan, workflow)) == inputs(workflow).keys() - fixed_names, name


def _read(name: str, plan: dict[str, Any], workflow: dict[str, Any]) -> dict[str, Any]:
    """Inputs as `pyflyte run remote-launchplan NAME` reads them, the plan not fetched and not started."""
    from flyteidl.admin import launch_plan_pb2
    from flyteidl.core import interface_pb2
    from flytekit.clis.sdk_in_container.run import DynamicEntityLaunchCommand
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.models.interface import TypedInterface as Interface
    from flytekit.models.launch_plan import LaunchPlanSpec
    from flytekit.remote.entities import FlyteLaunchPlan
    from flytekit.remote.interface import TypedInterface
    from google.protobuf.json_format import ParseDict

    spec = LaunchPlanSpec.from_flyte_idl(ParseDict(plan["spec"], launch_plan_pb2.LaunchPlanSpec()))
    entity: Any = FlyteLaunchPlan.promote_from_model(spec.workflow_id, spec)
    sent = Interface.from_flyte_idl(ParseDict(workflow["interface"], interface_pb2.TypedInterface()))
    entity._interface = TypedInterface.promote_from_model(sent)
    command = DynamicEntityLaunchCommand(name, "", name, DynamicEntityLaunchCommand.LP_LAUNCHER)
    command._entity = entity
    remote = SimpleNamespace(context=FlyteContextManager.current_context())
    level = SimpleNamespace(remote=True, is_remote=True, remote_instance=lambda: remote)
    return {key: value for key, value in command.make_context(name, [], obj=level).params.items() if key}


@profiles
def test_launch_forms_are_flat_and_every_input_is_described(profile: str) -> None:
    workflows = registered(profile).workflows
    for workflow in (workflows[name] for name in sorted(WHOLE)):
        for name, variable in inputs(workflow).items():
            kind = variable["type"].get("collectionType", variable["type"])
            if "unionType" in kind:  # an input that may be left out
                kind, nothing = kind["unionType"]["variants"]
                assert nothing["simple"] == "NONE"
            is_flat = kind.get("simple") in ("STRING", "INTEGER", "FLOAT", "BOOLEAN") or "enumType" in kind
            assert is_flat or "blob" in kind, name
            assert len(variable["description"].split()) > 3, name


@profiles
def test_outputs_and_nodes_have_names_of_their_own(profile: str) -> None:
    found = registered(profile)
    own = [task for name, task in found.tasks.items() if name not in IN_ARRAYS]  # flytekit names an array's output
    for entity in [*found.workflows.values(), *own]:
        assert not [name for name in entity["interface"]["outputs"].get("variables", {}) if name.startswith("o")]
    for workflow in found.workflows.values():
        names = [node["metadata"]["name"] for node in workflow["nodes"]]
        assert len(set(names)) == len(names)
        assert not [name for name in names if "map_" in name or "." in name]


def test_the_page_of_a_workflow_says_what_it_does_and_what_each_input_means() -> None:
    for name in WHOLE:
        description = registered("cpu").workflows[name]["description"]
        assert description["shortDescription"]
        about, _, lines = description["longDescription"]["value"].partition("**Inputs**")
        assert len(about.split()) > 15, name
        module = importlib.import_module(f"workflows.{'losslessness' if name == 'certify' else name}")
        declared = list(vars(module)[name].python_interface.inputs)
        assert [line.split("`")[1] for line in lines.splitlines() if line] == declared


@pytest.mark.parametrize("workflow", sorted(WHOLE))
def test_a_graph_is_read_on_one_screen_and_a_pods_name_tells_its_stage(workflow: str) -> None:
    """Propeller hashes a node's id, its parent's included, beyond 20 characters."""
    found = registered("gb200").workflows
    nodes = flat(found, workflow)
    assert [name for name in nodes if len(name) > 20] == []
    parents = {name.partition("-0-")[0] for name in nodes if "-0-" in name}
    assert parents <= NESTED
    for level in (workflow, *parents):
        assert len(edges(found[level])) <= 12, level
        assert found[level]["metadata"]["onFailure"] == "FAIL_AFTER_EXECUTABLE_NODES_COMPLETE"


def test_an_asynchronous_run_trains_and_evaluates_every_arm_in_both_loops() -> None:
    found = registered("gb200").workflows
    nodes = flat(found, "asynchronous_rl")
    assert [name for name in nodes if name.startswith("train")] == ["train-0-synchronous", "train-0-asynchronous"]
    (measure,) = [node for node in found["asynchronous_rl"]["nodes"] if node["id"] == "measure"]
    bound = {binding["var"]: binding["binding"] for binding in measure["inputs"]}
    assert bound["arms"]["promise"] == {"nodeId": "train", "var": "trained"}
    assert bound["certified"]["promise"] == {"nodeId": "train", "var": "trained", "attrPath": [{"intValue": 1}]}


@profiles
@pytest.mark.parametrize("workflow", sorted(WHOLE))
def test_no_two_tasks_that_want_the_same_nodes_run_at_once(profile: str, workflow: str) -> None:
    nodes = flat(registered(profile).workflows, workflow)
    wanting = {name for name, (node, _) in nodes.items() if _task_of(node) in WITH_GPUS}
    expected = {"speculative_rl": 5, "asynchronous_rl": 6, "ablation": 3, "bake_off": 1, "certify": 1}
    assert len(wanting) == expected.get(workflow, 0)
    for one, other in combinations(sorted(wanting), 2):
        assert one in nodes[other][1] or other in nodes[one][1], f"{one} and {other} may ask for the same nodes at once"


def _task_of(node: dict[str, Any]) -> str:
    task = node.get("arrayNode", {}).get("node", node).get("taskNode", {})
    return task_name(task.get("referenceId", {}).get("name", ""))


@profiles
def test_a_task_has_its_image_time_for_every_attempt_and_perhaps_a_deck(profile: str) -> None:
    tasks = registered(profile).tasks
    for name, task in tasks.items():
        assert task["metadata"]["timeout"] == f"{90 * 86400}s", name  # room for the wait too
        container = task["container"] if profile == "local" else task["k8sPod"]["podSpec"]["containers"][0]
        takes_gpus = name in WITH_GPUS and profile in ("gb200", "h200")
        assert container["image"] == f"registry.example/slipstream-{'gpu' if takes_gpus else 'cpu'}:v1", name
    shown = {name for name, task in tasks.items() if task["metadata"].get("generatesDeck")}
    assert shown == {*WITH_GPUS, "report_speedup", "rank_ablation", "preflight"} - set(IN_ARRAYS)


def test_on_one_machine_tasks_are_plain_containers_without_pods_or_ray() -> None:
    sizes = [{"name": "CPU", "value": "2"}, {"name": "MEMORY", "value": "12Gi"}]
    for task in registered("local").tasks.values():
        assert (task["type"], "k8sPod" in task) == ("python-task", False)
        assert task["container"]["resources"]["requests"] == sizes


@profiles
def test_executions_run_as_the_service_account_and_know_store_and_root(profile: str) -> None:
    plans = registered(profile).plans
    root = _plain(plans["ablation"]["spec"]["defaultInputs"]["parameters"]["run_root"]["default"])
    assert root == ("runs" if profile == "local" else "/mnt/slipstream/runs") == read_profile(profile).run_root
    for name, plan in plans.items() if profile in ON_PODS else ():
        account = "slipstream-preflight" if name.endswith("preflight") else "slipstream"
        assert plan["spec"]["securityContext"]["runAs"] == {"k8sServiceAccount": account}, name
        assert plan["spec"]["rawOutputDataConfig"] == {"outputLocationPrefix": "s3://slipstream/flyte"}, name


@profiles
def test_parts_of_an_ablation_follow_one_another_and_none_sinks_another(profile: str) -> None:
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
def test_recurring_plans_run_once_at_a_time_and_take_the_days_seed(profile: str) -> None:
    plans = registered(profile).plans
    schedules = {name: plan["spec"]["entityMetadata"].get("schedule") for name, plan in plans.items()}
    assert {name: cron for name, cron in schedules.items() if cron} == {
        name: {"cronSchedule": {"schedule": cron}} for name, cron in SCHEDULED.items()
    }
    for plan in (plans[name] for name in SCHEDULED):
        assert plan["spec"]["concurrencyPolicy"] == {"max": 1, "behavior": "CONCURRENCY_LIMIT_BEHAVIOR_SKIP"}
        assert fixed(plan)["seed_of_the_day"] is True
        assert plan["spec"]["entityMetadata"].get("notifications", []) == []
        assert plan["isActivated"] is False
        assert "seeds" not in plan["spec"]["fixedInputs"]["literals"]


@pytest.mark.parametrize("profile", ["gb200", "cpu"])
def test_the_recipe_takes_every_variant_of_a_recurring_ablation(profile: str) -> None:
    from slipstream.drafts.config import DraftInit, DraftMethod
    from slipstream.study.variants import Grid, variant_recipes

    sizes = {}
    for name in ("nightly-draft-length", "weekly-draft-initialisation"):
        fixed = registered(profile).plans[name]["spec"]["fixedInputs"]["literals"]
        given = {key: _plain(value) for key, value in fixed.items() if key != "seed_of_the_day"}
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


def test_a_profile_of_sixteen_nodes_has_a_plan_for_them_and_says_whom_to_tell_of_others(tmp_path: Path) -> None:
    values = yaml.safe_load((CLUSTERS / "gb200.yaml").read_text())
    values["gpu"]["nodes"] = 16
    told = {"activate": True, "slack": ["runs@example.slack.com"], "email": ["team@example.com"]}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**values, "name": "mine", "parallel_parts": 3, "schedules": told}))
    found = registered(str(path))
    for name in SCHEDULED:
        assert found.plans[name]["isActivated"] is True
        slack, email = found.plans[name]["spec"]["entityMetadata"]["notifications"]
        assert slack["slack"] == {"recipientsEmail": ["runs@example.slack.com"]}
        assert set(slack["phases"]) == {"SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED"}
        assert email["email"] == {"recipientsEmail": ["team@example.com"]}
        assert set(email["phases"]) == {"FAILED", "TIMED_OUT", "ABORTED"}
    assert found.plans["ablation"]["isActivated"] is False
    lag = fixed(found.plans["rl-think-8b-async"])
    assert lag == {"recipe": "qwen3_8b", "workload": "rl_think", "max_off_policy_steps": "1"}
    arrays = [node["arrayNode"] for node in found.workflows["ablation"]["nodes"] if "arrayNode" in node]
    assert {array["parallelism"] for array in arrays} == {3}


@pytest.mark.parametrize("name", ["gb200", "h200"])
def test_the_recipe_and_the_nodes_take_every_plan_that_names_a_recipe(name: str, tmp_path: Path) -> None:
    from slipstream.recipe import resolve_recipe
    from slipstream.stages.context import requested, require_loop, with_lag
    from slipstream.stages.start_run import on_cluster
    from slipstream.stages.train_grpo import in_loop

    values = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())
    values["gpu"]["nodes"] = 16
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**values, "name": "mine"}))
    plans, taken = registered(str(path)).plans, []
    for plan in ("train-8b", "rl-zero-8b", "rl-think-8b", "rl-think-8b-async"):
        literals = plans[plan]["spec"]["fixedInputs"]["literals"]
        given = {key: _plain(value) for key, value in literals.items()}
        lag = int(given["max_off_policy_steps"]) if "max_off_policy_steps" in given else None
        loop = ArmLoop.SYNCHRONOUS if lag is None else ArmLoop.ASYNCHRONOUS
        workload = Workload(given["workload"]) if "workload" in given else None
        changes = requested(given.get("overrides", ()), workload=workload)
        changes = with_lag(changes, given["recipe"], max_off_policy_steps=lag, loop=loop)
        recipe, _ = resolve_recipe(given["recipe"], overrides=changes)
        require_loop(on_cluster(recipe, read_profile(str(path))), loop)
        in_loop(recipe, ArmLoop.SYNCHRONOUS)
        taken.append(recipe.layout.num_gpus)
    assert taken == {"gb200": [32, 32, 32, 64], "h200": [8, 8, 8, 128]}[name]


def _plain(literal: dict[str, Any]) -> Any:
    if "collection" in literal:
        return [_plain(item) for item in literal["collection"]["literals"]]
    scalar = literal["scalar"]
    return _plain(scalar["union"]["value"]) if "union" in scalar else next(iter(scalar["primitive"].values()))


def test_a_role_without_an_image_ends_the_registration(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("pyflyte")), "--pkgs", "workflows", "package"]
    command += ["--output", str(tmp_path / "p.tgz"), "--image", "cpu=registry.example/slipstream-cpu:v1"]
    environment = {**os.environ, "SLIPSTREAM_CLUSTER": "gb200"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "Image Config with name gpu not found" in found.stdout + found.stderr
    assert not (tmp_path / "p.tgz").exists()
