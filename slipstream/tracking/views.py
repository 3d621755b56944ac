"""Views of an experiment in MLflow's own interface: which runs its table shows, and with which columns.

MLflow's table shows neither metrics nor parameters by itself. It keeps shared views as tags of the experiment, named
`mlflow.sharedViewState.<key>`, and opens one at `#/experiments/<id>/runs?viewStateShareKey=<key>`.
Source: mlflow 3.17, `useSharedExperimentViewState` of its interface.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.tracking.config import EXECUTION, KIND_TAG

EXECUTIONS_VIEW = "executions"
ARMS_VIEW = "arms"

_EXECUTION_COLUMNS = (
    "result/generation_speedup",
    "result/step_speedup",
    "result/reward_autoregressive",
    "result/reward_speculative",
    "result/reward_difference",
    "result/mean_acceptance_length",
    "result/lossless",
    "result/hours",
)
_ARM_COLUMNS = ("mean/generation_s", "mean/step_s", "mean/reward", "mean/mean_acceptance_length")


def view_addresses(server: str, experiment_id: str) -> dict[str, str]:
    """Where a browser finds each view on the server."""
    return {view: f"{server.rstrip('/')}/{_route(experiment_id, view)}" for view in (EXECUTIONS_VIEW, ARMS_VIEW)}


def experiment_tags(experiment_id: str) -> dict[str, str]:
    """What an experiment needs to be read in MLflow's interface: its two views, and a description that links them."""
    executions, arms = (_route(experiment_id, view) for view in (EXECUTIONS_VIEW, ARMS_VIEW))
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": (
            f"Each execution is a run with the runs of its tasks below it. [Executions side by side]({executions}): "
            f"speedups, rewards, cost. [Arms side by side]({arms}): one run an arm, for curves over steps."
        ),
        f"mlflow.sharedViewState.{EXECUTIONS_VIEW}": _view(
            f"tags.`{KIND_TAG}` = '{EXECUTION}'", _EXECUTION_COLUMNS, params=("workload", "draft.method", "grpo.seed")
        ),
        f"mlflow.sharedViewState.{ARMS_VIEW}": _view(
            "params.arm LIKE '%'",
            _ARM_COLUMNS,
            params=("arm", "loop", "max_off_policy_steps", "k", "draft.method", "grpo.seed"),
        ),
    }


def _route(experiment_id: str, view: str) -> str:
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={view}"


def _view(search_filter: str, metrics: Sequence[str], *, params: Sequence[str]) -> str:
    columns = ["attributes.`Duration`", *(f"params.`{name}`" for name in params)]
    columns += [f"metrics.`{name}`" for name in metrics]
    # Sorted by anything but the start, the table does not fold runs below their parents.
    order = {"orderByKey": "tags.`mlflow.runName`", "orderByAsc": True}
    return json.dumps({"searchFilter": search_filter, "selectedColumns": columns, **order})
