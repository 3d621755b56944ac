"""Task that checks the recipe and opens the run of all other tasks."""

from __future__ import annotations

import os
from typing import NamedTuple

from flytekit import current_context, task
from flytekit.types.file import FlyteFile

from slipstream.stages import start_run as stage
from slipstream.stages.context import EXECUTION_VARIABLE, RunContext, new_execution, requested, with_lag
from slipstream.types import ArmLoop, Arms, Workload
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, CLUSTER, on_cpus, root_of

_LOCAL_EXECUTION = "local"


class StartedRun(NamedTuple):
    """Context of the run and its resolved recipe."""

    context: RunContext
    recipe: FlyteFile


@task(**on_cpus(retries=0))
@recoverable(CHECKING)
def start_run(  # noqa: PLR0913  # one input a line of the launch form
    recipe: str,
    workload: Workload | None,
    seed: int | None,
    overrides: list[str],
    run_root: str,
    num_steps: int | None = None,
    max_off_policy_steps: int | None = None,
    resume_execution: str | None = None,
    reuse_stored: bool = True,
    loop: ArmLoop | None = None,
    arms: Arms = Arms.BOTH,
) -> StartedRun:
    """Check the recipe against its rules and the cluster before any expensive work, and open the run.

    Inputs that are None keep the recipe's values. `loop` is the loop that the workflow trains; None trains no arm.
    """
    changes = requested(overrides, workload=workload, num_steps=num_steps, seed=seed)
    changes = with_lag(changes, recipe, max_off_policy_steps=max_off_policy_steps, loop=loop)
    context, resolved = stage.start_run(
        recipe,
        root=root_of(run_root),
        execution=resume_execution or execution_name(recipe),
        overrides=changes,
        resume=bool(resume_execution),
        reuse_stored=reuse_stored,
        cluster=CLUSTER,
        loop=loop,
        arms=arms,
    )
    return StartedRun(context=context, recipe=FlyteFile(str(resolved)))


def execution_name(recipe: str) -> str:
    """Return Flyte's name of the execution; a local run takes that of `slipstream run`, or one of recipe and time."""
    execution = current_context().execution_id
    if execution is not None and execution.name and execution.name != _LOCAL_EXECUTION:
        return execution.name
    return os.environ.get(EXECUTION_VARIABLE) or new_execution(recipe)
