"""What a cluster's Flyte is sent at registration, decoded, and the pods that it makes of it.

Run as a file with FILE as its argument, it writes what the profile in SLIPSTREAM_CLUSTER registers.
Tasks read the profile when they are imported, so each profile takes a process of its own.
"""

import copy
import importlib
import json
import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.forked.tasks import forked

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Registration:
    tasks: dict[str, dict[str, Any]]
    workflows: dict[str, dict[str, Any]]
    plans: dict[str, dict[str, Any]]


@cache
def registered(profile: str) -> Registration:
    """What a profile, by its name or path, registers: serialised once a session."""
    environment = {**os.environ, "SLIPSTREAM_CLUSTER": profile, "PYTHONPATH": str(ROOT)}
    with TemporaryDirectory() as directory:
        path = Path(directory) / "registered.json"
        subprocess.run(forked(__file__, str(path)), cwd=ROOT, env=environment, check=True, timeout=300)
        return Registration(**json.loads(path.read_text()))


def flat(workflows: dict[str, dict[str, Any]], name: str) -> dict[str, tuple[dict[str, Any], set[str]]]:
    """Each node of a workflow and of those that it nests, by the id that propeller names pods by, and what precedes it.

    A node may run when its own upstream nodes, and those of the node that nests it, have ended; a nested workflow has
    ended when all its nodes have.
    """
    found: dict[str, tuple[dict[str, Any], set[str]]] = {}
    ends: dict[str, set[str]] = {}  # of a node of this level: the nodes that must have ended
    waiting = {node["id"]: node for node in workflows[name]["nodes"]}
    while waiting:
        for id_, node in list(waiting.items()):
            direct = set(node.get("upstreamNodeIds", ())) - {"start-node"}
            if direct & waiting.keys():
                continue
            del waiting[id_]
            before = set().union(*(ends[each] for each in direct))
            before |= set().union(*(found[each][1] for each in before))
            nested = node.get("workflowNode", {}).get("subWorkflowRef", {}).get("name", "").rpartition(".")[2]
            children = flat(workflows, nested) if nested else {}
            inner = {f"{id_}-0-{key}": (child, up) for key, (child, up) in children.items()}
            for key, (child, up) in inner.items():
                found[key] = (child, before | {f"{id_}-0-{each}" for each in up})
            if not nested:
                found[id_] = (node, before)
            ends[id_] = set(inner) or {id_}
    return found


def edges(workflow: dict[str, Any]) -> set[tuple[str, str]]:
    """Edges of a workflow's graph, those from its inputs included."""

    def sources(binding: Any) -> set[str]:
        if isinstance(binding, dict):
            own = {binding["promise"].get("nodeId", "start-node")} if "promise" in binding else set()
            return own.union(*map(sources, binding.values()))
        return set().union(*map(sources, binding)) if isinstance(binding, list) else set()

    nodes = workflow["nodes"]
    bound = {(source, node["id"]) for node in nodes for source in sources(node.get("inputs", []))}
    return bound | {(source, node["id"]) for node in nodes for source in node.get("upstreamNodeIds", ())}


def pods(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pods of a task by kind, as Flyte's propeller makes them: of a Ray job, or the one `task`.

    The merge is that of mergo's WithOverride and WithAppendSlice, containers by name, as in
    flytek8s.MergeOverlayPodSpecOntoBase.
    """
    base = task["k8sPod"]["podSpec"]
    if task["type"] != "ray":
        return {"task": _pod(base, task["k8sPod"]["metadata"])}
    cluster = task["custom"]["rayCluster"]
    metadata = task["k8sPod"]["metadata"]
    made = {"submitter": _pod(base, metadata)}
    groups = {"ray-head": cluster["headGroupSpec"], "ray-worker": cluster["workerGroupSpec"][0]}
    for name, group in groups.items():
        renamed = copy.deepcopy(base)
        renamed["containers"][0] |= {"name": name, "args": []}
        merged = _lay_over(renamed, group["k8sPod"]["podSpec"])
        own = {
            kind: metadata.get(kind, {}) | group["k8sPod"]["metadata"].get(kind, {})
            for kind in ("labels", "annotations")
        }
        made[name] = _pod(merged, own)
    return made


def ray_job(task: dict[str, Any]) -> dict[str, Any]:
    """The RayJob of a task as propeller's Ray plugin makes it, with the token as deploy/ray_token adds it."""
    made = pods(task)
    custom = _integers(task["custom"])
    head, worker = custom["rayCluster"]["headGroupSpec"], custom["rayCluster"]["workerGroupSpec"][0]

    def template(kind: str) -> dict[str, Any]:
        return {"metadata": made[kind]["metadata"], "spec": made[kind]["spec"]}

    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "f0123456789abcdef012-n0-0", "labels": task["k8sPod"]["metadata"]["labels"]},
        "spec": {
            "entrypoint": " ".join(made["submitter"]["spec"]["containers"][0]["args"]),
            "shutdownAfterJobFinishes": custom["shutdownAfterJobFinishes"],
            "ttlSecondsAfterFinished": custom.get("ttlSecondsAfterFinished", 0),
            "submitterPodTemplate": template("submitter"),
            "rayClusterSpec": {
                "rayVersion": "2.60.0",
                "authOptions": {"mode": "token", "secretName": "slipstream-ray"},
                "headGroupSpec": {"rayStartParams": head["rayStartParams"], "template": template("ray-head")},
                "workerGroupSpecs": [
                    {key: worker[key] for key in ("groupName", "replicas", "minReplicas", "maxReplicas")}
                    | {"rayStartParams": worker["rayStartParams"], "template": template("ray-worker")}
                ],
            },
        },
    }


def _pod(spec: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **metadata}, "spec": spec}
    return _integers(whole)


def _lay_over(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in overlay.items():
        if key == "containers":
            by_name = {container["name"]: container for container in value}
            merged[key] = [_lay_over(container, by_name.get(container["name"], {})) for container in base[key]]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _lay_over(merged[key], value)
        elif isinstance(value, list):
            merged[key] = [*merged.get(key, []), *value]
        else:
            merged[key] = value
    return merged


def _integers(value: Any) -> Any:
    """Protobuf's structs know floats alone; Kubernetes' decoder takes whole ones for integers."""
    if isinstance(value, dict):
        return {key: _integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _registered() -> dict[str, dict[str, Any]]:
    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.core.launch_plan import LaunchPlan
    from flytekit.models.admin.workflow import WorkflowSpec
    from flytekit.models.core.workflow import Node
    from flytekit.models.launch_plan import LaunchPlan as SentPlan
    from flytekit.models.task import TaskSpec
    from flytekit.tools.translator import get_serializable
    from google.protobuf.json_format import MessageToDict

    importlib.import_module("workflows.launch_plans")
    importlib.import_module("workflows.schedules")
    images = [Image(name=role, fqn=f"registry.example/slipstream-{role}", tag="v1") for role in ("cpu", "gpu")]
    settings = SerializationSettings(
        project="p", domain="d", version="v", env={}, image_config=ImageConfig(default_image=None, images=images)
    )
    entities: OrderedDict[Any, Any] = OrderedDict()
    for plan in list(LaunchPlan.CACHE.values()):  # those of the workflows' own names too
        get_serializable(entities, settings, plan)
    found: dict[str, dict[str, Any]] = {"tasks": {}, "workflows": {}, "plans": {}}
    for model in entities.values():
        sent = model.to_flyte_idl()
        if isinstance(model, Node):
            continue  # of an array: the workflow holds it too
        decoded = MessageToDict(type(sent).FromString(sent.SerializeToString()))
        if isinstance(model, SentPlan):
            found["plans"][decoded["id"]["name"]] = decoded | {"isActivated": model.should_auto_activate}
        elif isinstance(model, TaskSpec | WorkflowSpec):
            template = decoded["template"] | {"description": decoded.get("description", {})}
            name = task_name(template["id"]["name"])
            found["tasks" if isinstance(model, TaskSpec) else "workflows"][name] = template
    return found


def task_name(name: str) -> str:
    """Without its module; of a task in an array, without what flytekit adds."""
    name = name.rpartition(".")[2]
    return "_".join(name.split("_")[1:-1]) if name.endswith("-arraynode") else name


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_registered()))
