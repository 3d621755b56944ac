"""The workflow as a cluster would register it: what people launch must not change by accident.

To accept a change on purpose: `python -m tests.unit.test_workflow` from the root of the repository.
"""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

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
    get_serializable(entities, settings, speculative_rl)
    found: dict[str, Any] = {"tasks": {}}
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
            found["inputs"] = sorted(template["interface"]["inputs"]["variables"])
            found["nodes"] = {
                node["id"]: [node["taskNode"]["referenceId"]["name"], sorted(node.get("upstreamNodeIds", []))]
                for node in template["nodes"]
            }
    return found


def test_the_registered_workflow_is_the_golden_one() -> None:
    assert _registered() == json.loads(GOLDEN.read_text())


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
