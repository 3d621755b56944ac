"""Launch plans of the Flyte UI; docs/deploy.md describes purpose, inputs and cost of each.

Each launch plan runs under the cluster's service account and writes to its object store. Fixed inputs are a recipe and
a workload; the launch form asks for the others.
"""

# flytekit types a decorated workflow as a plain function.
# pyright: reportArgumentType=false

from __future__ import annotations

from flytekit import LaunchPlan

from slipstream.kubernetes.pods import PREFLIGHT_ACCOUNT
from slipstream.types import Arms, Workload
from tasks.resources import CLUSTER
from workflows.ablation import ablation as ablation_workflow
from workflows.asynchronous_rl import asynchronous_rl
from workflows.bake_off import bake_off as bake_off_workflow
from workflows.losslessness import certify as certify_workflow
from workflows.on_cluster import on_cluster
from workflows.preflight import preflight as preflight_workflow
from workflows.projection import projection as projection_workflow
from workflows.speculative_rl import speculative_rl

tiny_smoke = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="tiny-smoke",
    fixed_inputs={"recipe": "tiny"},
    **on_cluster(),
)
tiny_async = LaunchPlan.get_or_create(
    workflow=asynchronous_rl,
    name="tiny-async",
    fixed_inputs={"recipe": "tiny_async"},
    **on_cluster(),
)
train_8b = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="train-8b",
    fixed_inputs={"recipe": CLUSTER.recipe_8b, "arms": Arms.SPECULATIVE},
    **on_cluster(),
)
rl_zero_8b = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="rl-zero-8b",
    fixed_inputs={"recipe": CLUSTER.recipe_8b, "workload": Workload.RL_ZERO},
    **on_cluster(),
)
rl_think_8b = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="rl-think-8b",
    fixed_inputs={"recipe": CLUSTER.recipe_8b, "workload": Workload.RL_THINK},
    **on_cluster(),
)
rl_think_8b_async = LaunchPlan.get_or_create(
    workflow=asynchronous_rl,
    name="rl-think-8b-async",
    fixed_inputs={
        "recipe": CLUSTER.recipe_8b,
        "workload": Workload.RL_THINK,
        "max_off_policy_steps": 1,
        "overrides": [
            "placement.mode=split",
            "placement.nodes=16",
            "placement.generation_nodes=12",
            "placement.training_nodes=4",
            "engine.num_engines=48",
            "learner.parallel.data=4",
            "grpo.loss.correction=token",
            "grpo.loss.truncated_importance_sampling=2.0",
        ],
    },
    **on_cluster(),
)
certify = LaunchPlan.get_or_create(workflow=certify_workflow, name="certify", **on_cluster())
projection = LaunchPlan.get_or_create(workflow=projection_workflow, name="projection", **on_cluster())
ablation = LaunchPlan.get_or_create(workflow=ablation_workflow, name="ablation", **on_cluster())
bake_off = LaunchPlan.get_or_create(workflow=bake_off_workflow, name="bake-off", **on_cluster())
preflight = LaunchPlan.get_or_create(workflow=preflight_workflow, name="preflight", **on_cluster(PREFLIGHT_ACCOUNT))
