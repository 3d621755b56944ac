"""Presets of the chain, as the UI lists them: docs/deploy.md says what each is for, takes and costs.

Each runs under the cluster's service account and writes to its object store; recipe and workload are fixed, the rest
of the form is open.
"""

# flytekit types a decorated workflow as the plain function that it was.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

from flytekit import LaunchPlan
from flytekit.models.common import RawOutputDataConfig
from flytekit.models.security import Identity, SecurityContext

from slipstream.cluster.pods import PREFLIGHT_ACCOUNT
from slipstream.types import Workload
from tasks.resources import CLUSTER
from workflows.losslessness import certify as certify_workflow
from workflows.preflight import preflight as preflight_workflow
from workflows.projection import projection as projection_workflow
from workflows.speculative_rl import speculative_rl


def _on_cluster(account: str | None = CLUSTER.service_account) -> dict[str, Any]:
    """As whom pods run, and where Flyte keeps what they hand on."""
    settings: dict[str, Any] = {}
    if account is not None and not CLUSTER.is_local:
        settings["security_context"] = SecurityContext(run_as=Identity(k8s_service_account=account))
    if CLUSTER.object_store is not None:
        settings["raw_output_data_config"] = RawOutputDataConfig(CLUSTER.object_store.prefix)
    return settings


tiny_smoke = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="tiny-smoke",
    fixed_inputs={"recipe": "tiny"},
    **_on_cluster(),
)
rl_zero_8b = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="rl-zero-8b",
    fixed_inputs={"recipe": CLUSTER.recipe_8b, "workload": Workload.RL_ZERO},
    **_on_cluster(),
)
rl_think_8b = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="rl-think-8b",
    fixed_inputs={"recipe": CLUSTER.recipe_8b, "workload": Workload.RL_THINK},
    **_on_cluster(),
)
rl_think_8b_async = LaunchPlan.get_or_create(
    workflow=speculative_rl,
    name="rl-think-8b-async",
    fixed_inputs={
        "recipe": CLUSTER.recipe_8b,
        "workload": Workload.RL_THINK,
        "max_off_policy_steps": 1,  # refused by start_run until there is a loop for it
        "overrides": [
            "placement.mode=split",
            "placement.nodes=16",
            "placement.generation_nodes=12",
            "placement.training_nodes=4",
            "engine.num_engines=48",
            "learner.parallel.data=4",
        ],
    },
    **_on_cluster(),
)
certify = LaunchPlan.get_or_create(workflow=certify_workflow, name="certify", **_on_cluster())
projection = LaunchPlan.get_or_create(workflow=projection_workflow, name="projection", **_on_cluster())
preflight = LaunchPlan.get_or_create(workflow=preflight_workflow, name="preflight", **_on_cluster(PREFLIGHT_ACCOUNT))
