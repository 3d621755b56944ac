"""Check the recipe and open the run that all other tasks belong to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flytekit import current_context, task
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.stages import start_run as stage
from slipstream.stages.context import EXECUTION_VARIABLE, RunContext, new_execution
from slipstream.types import Workload
from tasks.recoverable import recoverable
from tasks.resources import IMAGE, SMALL

_LOCAL_EXECUTION = "local"


class StartedRun(NamedTuple):
    """What the other tasks need to know of the run."""

    context: RunContext
    recipe: FlyteFile


@task(container_image=IMAGE, requests=SMALL)
@recoverable
def start_run(
    recipe: str,
    workload: Workload,
    num_steps: int,
    seed: int,
    run_root: str,
    resume_execution: str,
    reuse_stored: bool,
) -> StartedRun:
    """Raises before anything expensive starts if the recipe breaks a rule. `num_steps` 0 keeps the recipe's."""
    logs.configure()
    overrides = {"grpo": {"seed": seed, **({"num_steps": num_steps} if num_steps else {})}}
    context, resolved = stage.start_run(
        recipe,
        workload=workload,
        root=Path(run_root),
        execution=resume_execution or _execution(recipe),
        overrides=overrides,
        resume=bool(resume_execution),
        reuse_stored=reuse_stored,
    )
    return StartedRun(context=context, recipe=FlyteFile(str(resolved)))


def _execution(recipe: str) -> str:
    """The platform's name of the execution; on a laptop `slipstream demo`'s, else one of recipe and time."""
    execution = current_context().execution_id
    if execution is not None and execution.name and execution.name != _LOCAL_EXECUTION:
        return execution.name
    return os.environ.get(EXECUTION_VARIABLE) or new_execution(recipe)
