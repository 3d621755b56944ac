"""Recurring launch plans; docs/operate.md describes schedule, inputs and activation of each.

The day of the kickoff is the seed of a plan. Flyte skips a kickoff while the last execution runs. A launch plan is
activated at registration if the cluster profile sets `schedules.activate`, else by `flytectl update launchplan`. The
profile names the recipients of notifications, too.
"""

# flytekit types a decorated workflow as a plain function.
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
from workflows.on_cluster import RECIPE, on_cluster
from workflows.projection import projection

_FAILED = [WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.TIMED_OUT, WorkflowExecutionPhase.ABORTED]
_ENDED = [*_FAILED, WorkflowExecutionPhase.SUCCEEDED]
# Enough steps for the interval of a speedup; a comparison of rewards needs a run of the whole chain.
_BY_DAY = {"seed_of_the_day": True}
_STEPS = {"nightly": 12, "weekly": 24}


def _recurring(cron: str) -> dict[str, Any]:
    """Return the arguments that all recurring launch plans share; Slack hears of every end, e-mail of failures."""
    told: list[Notification] = []
    if CLUSTER.schedules.slack:
        told.append(Slack(phases=_ENDED, recipients_email=list(CLUSTER.schedules.slack)))
    if CLUSTER.schedules.email:
        told.append(Email(phases=_FAILED, recipients_email=list(CLUSTER.schedules.email)))
    return {
        "schedule": CronSchedule(schedule=cron),  # in UTC
        "concurrency": ConcurrencyPolicy(max_concurrency=1),  # Flyte's only behaviour here is to skip a kickoff
        "notifications": told,
        "auto_activate": CLUSTER.schedules.activate,
        **on_cluster(),
    }


nightly_draft_length = LaunchPlan.get_or_create(
    workflow=ablation,
    name="nightly-draft-length",
    fixed_inputs={"recipe": RECIPE, "draft_lengths": [1, 3, 5, 7], "num_steps": _STEPS["nightly"], **_BY_DAY},
    **_recurring("0 1 * * *"),
)
weekly_draft_initialisation = LaunchPlan.get_or_create(
    workflow=ablation,
    name="weekly-draft-initialisation",
    fixed_inputs={
        "recipe": RECIPE,
        "draft_inits": list(FRESH_INITS),
        "methods": [DraftMethod.EAGLE3],
        "draft_lengths": [0],
        "num_steps": _STEPS["weekly"],
        **_BY_DAY,
    },
    **_recurring("0 5 * * 6"),
)
monthly_projection = LaunchPlan.get_or_create(
    workflow=projection, name="monthly-projection", fixed_inputs=dict(_BY_DAY), **_recurring("0 6 1 * *")
)
