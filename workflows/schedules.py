"""Recurring launch plans: docs/operate.md says when each runs, what it takes and how it is started.

Each has the time of its kickoff as an input, takes its seed from it, and is skipped while its last execution goes on.
Flyte starts them only once they are active: at registration where the cluster profile says `schedules.activate`, else
by `flytectl update launchplan`. Whom Flyte tells how they ended is the profile's too.
"""

# flytekit types a decorated workflow as the plain function that it was.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

from flytekit import CronSchedule, Email, LaunchPlan, Slack
from flytekit.core.notification import Notification
from flytekit.models.concurrency import ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase

from slipstream.drafts.config import FRESH_INITS, DraftMethod
from tasks.resources import CLUSTER
from workflows.ablation import ablation
from workflows.on_cluster import on_cluster
from workflows.projection import projection

_FAILED = [WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.TIMED_OUT, WorkflowExecutionPhase.ABORTED]
_ENDED = [*_FAILED, WorkflowExecutionPhase.SUCCEEDED]
_KICKOFF = "kickoff_time"
# Enough for the intervals of a speedup; whether rewards agree is for a run of the whole chain.
_STEPS = {"nightly": 12, "weekly": 24}


def _recurring(cron: str) -> dict[str, Any]:
    """What all of them have in common. Slack hears of every end, a mailbox only of a bad one."""
    told: list[Notification] = []
    if CLUSTER.schedules.slack:
        told.append(Slack(phases=_ENDED, recipients_email=list(CLUSTER.schedules.slack)))
    if CLUSTER.schedules.email:
        told.append(Email(phases=_FAILED, recipients_email=list(CLUSTER.schedules.email)))
    return {
        "schedule": CronSchedule(schedule=cron, kickoff_time_input_arg=_KICKOFF),  # in UTC
        "concurrency": ConcurrencyPolicy(max_concurrency=1),  # its one behaviour is to skip
        "notifications": told,
        "auto_activate": CLUSTER.schedules.activate,
        **on_cluster(),
    }


_RECIPE = CLUSTER.recipe_8b if CLUSTER.gpu is not None else "tiny"

nightly_draft_length = LaunchPlan.get_or_create(
    workflow=ablation,
    name="nightly-draft-length",
    fixed_inputs={"recipe": _RECIPE, "draft_lengths": [1, 3, 5, 7], "num_steps": _STEPS["nightly"]},
    **_recurring("0 1 * * *"),
)
weekly_draft_initialisation = LaunchPlan.get_or_create(
    workflow=ablation,
    name="weekly-draft-initialisation",
    fixed_inputs={
        "recipe": _RECIPE,
        "draft_inits": list(FRESH_INITS),
        "methods": [DraftMethod.EAGLE3],
        "draft_lengths": [0],
        "num_steps": _STEPS["weekly"],
    },
    **_recurring("0 5 * * 6"),
)
monthly_projection = LaunchPlan.get_or_create(workflow=projection, name="monthly-projection", **_recurring("0 6 1 * *"))
