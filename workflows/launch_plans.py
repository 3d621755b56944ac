"""Launch plans of the Flyte UI; docs/deploy.md describes purpose, inputs and cost of each.

Each launch plan runs under the cluster's service account and writes to its object store. Fixed inputs are a recipe and
a workload; the launch form asks for the others. A profile registers only plans that its nodes can run, because Flyte's
console and command line start the version of a name that was registered last, whichever profile it was of.
"""

# flytekit types a decorated workflow as a plain function.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

from flytekit import LaunchPlan

from slipstream.kubernetes.pods import PREFLIGHT_ACCOUNT
from slipstream.types import Arms, Workload
from tasks.resources import CLUSTER
from workflows.ablation import ablation
from workflows.asynchronous_rl import asynchronous_rl
from workflows.bake_off import bake_off
from workflows.losslessness import certify
from workflows.on_cluster import on_cluster
from workflows.preflight import preflight
from workflows.projection import projection
from workflows.speculative_rl import speculative_rl

_NODES = CLUSTER.gpu.nodes if CLUSTER.gpu is not None else 0
_GPUS = CLUSTER.gpu.gpus_per_node if CLUSTER.gpu is not None else 0
_LAG = {
    "recipe": CLUSTER.recipe_8b,
    "workload": Workload.RL_THINK,
    "max_off_policy_steps": 1,
    "overrides": [
        "placement.mode=split",
        "placement.memory=shared",
        "placement.nodes=16",
        f"placement.gpus_per_node={_GPUS}",
        "placement.generation_nodes=12",
        "placement.training_nodes=4",
        f"engine.num_engines={12 * _GPUS}",
        f"grpo.prompts_per_step={12 * _GPUS}",  # a group runs on one engine
        f"learner.parallel.data={2 * _GPUS}",  # of the recipe's two ranks each
        "grpo.loss.correction=token",
        "grpo.loss.truncated_importance_sampling=2.0",
    ],
}
# name: (workflow, fixed inputs, whether the profile's nodes can run it)
_PLANS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "tiny-smoke": (speculative_rl, {"recipe": "tiny"}, not _NODES),
    "tiny-async": (asynchronous_rl, {"recipe": "tiny_async"}, not _NODES),
    "tiny-train": (speculative_rl, {"recipe": "tiny", "arms": Arms.SPECULATIVE}, not _NODES),
    "train-8b": (speculative_rl, {"recipe": CLUSTER.recipe_8b, "arms": Arms.SPECULATIVE}, _NODES > 0),
    "rl-zero-8b": (speculative_rl, {"recipe": CLUSTER.recipe_8b, "workload": Workload.RL_ZERO}, _NODES > 0),
    "rl-think-8b": (speculative_rl, {"recipe": CLUSTER.recipe_8b, "workload": Workload.RL_THINK}, _NODES > 0),
    "rl-think-8b-async": (asynchronous_rl, _LAG, _NODES >= 16),
    "certify": (certify, {}, True),
    "projection": (projection, {}, True),
    "ablation": (ablation, {}, True),
    "bake-off": (bake_off, {}, True),
}
PLANS = {
    name: LaunchPlan.get_or_create(workflow=of, name=name, fixed_inputs=fixed, **on_cluster())
    for name, (of, fixed, runs_here) in _PLANS.items()
    if runs_here
}
PLANS["preflight"] = LaunchPlan.get_or_create(workflow=preflight, name="preflight", **on_cluster(PREFLIGHT_ACCOUNT))
