"""The workflow as a cluster would register it: what people launch must not change by accident.

To accept a change on purpose: `python -m tests.unit.test_workflow` from the root of the repository.
"""

import json
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from slipstream.recipe import CONFIGS
from slipstream.run_command import started
from slipstream.types import Arms, Workload

GOLDEN = Path(__file__).with_name("golden") / "speculative_rl.json"


def _registered() -> dict[str, Any]:
    """Interface, nodes and tasks of the serialised workflow, without what depends on the machine."""
    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.models.admin.workflow import WorkflowSpec
    from flytekit.models.task import TaskSpec
    from flytekit.tools.translator import get_serializable
    from google.protobuf.json_format import MessageToDict

    from workflows.speculative_rl import speculative_rl

    image = Image(name="cpu", fqn="slipstream", tag="golden")
    settings = SerializationSettings(
        project="p", domain="d", version="v", env={}, image_config=ImageConfig(default_image=None, images=[image])
    )
    entities: OrderedDict[Any, Any] = OrderedDict()
    get_serializable(entities, settings, speculative_rl)  # pyright: ignore[reportArgumentType]  # it is a workflow
    found: dict[str, Any] = {"tasks": {}, "workflows": {}}
    for spec in entities.values():
        if isinstance(spec, TaskSpec):
            template = MessageToDict(spec.template.to_flyte_idl())
            found["tasks"][template["id"]["name"]] = {
                "metadata": {k: v for k, v in template["metadata"].items() if k != "runtime"},
                "resources": template["container"]["resources"],
                "inputs": sorted(template["interface"].get("inputs", {}).get("variables", {})),
                "outputs": sorted(template["interface"].get("outputs", {}).get("variables", {})),
            }
        elif isinstance(spec, WorkflowSpec):
            template = MessageToDict(spec.template.to_flyte_idl())
            found["workflows"][template["id"]["name"]] = {
                "inputs": sorted(template["interface"]["inputs"]["variables"]),
                "nodes": {
                    node["id"]: [_entity(node), sorted(node.get("upstreamNodeIds", []))] for node in template["nodes"]
                },
            }
    return found


def _entity(node: dict[str, Any]) -> str:
    reference = node["taskNode"]["referenceId"] if "taskNode" in node else node["workflowNode"]["subWorkflowRef"]
    return reference["name"]


def test_the_registered_workflow_is_the_golden_one() -> None:
    assert _registered() == json.loads(GOLDEN.read_text())


def _inputs_read(monkeypatch: pytest.MonkeyPatch, workflow: str, *arguments: str) -> dict[str, Any]:
    """What `pyflyte run` reads from its command line, the workflow not run."""
    from click.testing import CliRunner
    from flytekit.clis.sdk_in_container import run
    from flytekit.clis.sdk_in_container.pyflyte import main

    seen: dict[str, Any] = {}
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.setattr(run, "run_command", lambda *_: lambda **inputs: seen.update(inputs))
    ended = CliRunner().invoke(main, ["run", f"workflows/{workflow}.py", workflow, *arguments])
    assert (ended.exit_code, ended.exception) == (0, None), ended.output
    return seen


def test_pyflyte_run_reads_what_a_demo_was_given_and_nothing_where_it_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"workload": Workload.RL_THINK, "seed": 0, "num_steps": None}
    launch = started(
        "tiny", reuse_stored=True, arms=Arms.SPECULATIVE, overrides=["placement.arms_in_turn=off"], **given
    )
    read = _inputs_read(monkeypatch, "speculative_rl", *launch.command(Path("/runs"))[4:])
    assert (read["workload"], read["seed"], read["num_steps"]) == (Workload.RL_THINK, 0, None)
    assert read["arms"] is Arms.SPECULATIVE
    assert read["overrides"] == ["placement.arms_in_turn=off"]


@pytest.mark.parametrize("workflow", ["speculative_rl", "asynchronous_rl", "bake_off", "ablation"])
def test_inputs_that_are_left_out_say_nothing_of_the_recipe(workflow: str) -> None:
    inputs = getattr(import_module(f"workflows.{workflow}"), workflow).python_interface.inputs_with_defaults
    own = {"workload", "num_steps", "seed", "max_off_policy_steps", "overrides", "seeds", "workloads"} & inputs.keys()
    if workflow == "ablation":
        own |= {"draft_inits", "methods", "losses", "draft_lengths"}
    assert len(own) >= 4
    assert all(inputs[name][1] in (None, []) for name in own)


def test_the_documents_show_the_workflows_as_they_are_compiled() -> None:
    from scripts.draw_workflows import IMAGES, NAMES, picture, tasks_with_gpus

    for name in NAMES:
        drawn = (IMAGES / f"workflow_{name}.svg").read_text()
        assert drawn == picture(name, tasks_with_gpus()), "run scripts/draw_workflows.py"


def test_the_store_alone_keeps_outputs_and_every_expensive_task_is_retried() -> None:
    tasks = {name.rpartition(".")[2]: spec["metadata"] for name, spec in _registered()["tasks"].items()}
    cached = {name for name, metadata in tasks.items() if metadata.get("discoverable")}
    assert cached == set()
    cheap = {
        "start_run",
        "require_lossless",
        "require_no_drift",
    }  # they read and check: a second attempt would say the same
    assert all(metadata["retries"].get("retries") == 2 for name, metadata in tasks.items() if name not in cheap)


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(_registered(), indent=1, sort_keys=True) + "\n")
