"""Settings that all workflows and launch plans of a cluster share."""

# flytekit types a decorated workflow as a plain function.
# pyright: reportArgumentType=false, reportReturnType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from flytekit import LaunchPlan, WorkflowFailurePolicy
from flytekit import workflow as flyte_workflow
from flytekit.core.docstring import Docstring
from flytekit.models.common import RawOutputDataConfig
from flytekit.models.documentation import Description
from flytekit.models.security import Identity, SecurityContext

from tasks.resources import CLUSTER

RECIPE = CLUSTER.recipe_8b if CLUSTER.gpu is not None else "tiny"
"""Recipe of a launch form unless the user names another: one that fits the profile's nodes."""

P = ParamSpec("P")
R = TypeVar("R")


def workflow(
    *, on_failure: Any = None, account: str | None = CLUSTER.service_account
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a workflow whose failed node ends no other, with a description and a default plan that runs.

    Flyte's console shows no description of an input in its launch form, but the long description of a workflow on the
    workflow's page: the docstring's paragraphs, and a line an input. `Launch Workflow` starts the plan that has the
    workflow's name, so that plan too has the profile's account and storage.
    """

    def decorated(body: Callable[P, R]) -> Callable[P, R]:
        made: Any = flyte_workflow(
            body,
            failure_policy=WorkflowFailurePolicy.FAIL_AFTER_EXECUTABLE_NODES_COMPLETE,
            on_failure=on_failure,
        )
        written = Docstring(callable_=body)
        lines = [f"- `{name}`: {' '.join(text.split())}" for name, text in written.input_descriptions.items()]
        text = [written.long_description or "", "**Inputs**", "\n".join(lines)]
        made.docs.long_description = Description(
            value="\n\n".join(filter(None, text)), format=Description.DescriptionFormat.MARKDOWN
        )
        LaunchPlan.create(name=made.name, workflow=made, **on_cluster(account))
        return made

    return decorated


def on_cluster(account: str | None = CLUSTER.service_account) -> dict[str, Any]:
    """Return the service account of the pods and the prefix of Flyte's outputs, as arguments of a launch plan."""
    settings: dict[str, Any] = {}
    if account is not None and not CLUSTER.is_local:
        settings["security_context"] = SecurityContext(run_as=Identity(k8s_service_account=account))
    if CLUSTER.object_store is not None:
        settings["raw_output_data_config"] = RawOutputDataConfig(CLUSTER.object_store.prefix)
    return settings


def named(node: Any, name: str, node_name: str) -> Any:
    """Name a node: in the console's graph, and in the names of its pods."""
    return node.with_overrides(name=name, node_name=node_name)
