"""Tasks that Flyte runs when an execution fails: end its MLflow runs and write the failure.

Flyte 1 gives the failure node's own name as that of the node that failed, so the stage comes from the run's files.
"""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.error.error import FlyteError

from slipstream.stages import fail_run as stage
from slipstream.types import Arms, Workload
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, on_cpus, root_of
from tasks.start_run import execution_name


@task(**on_cpus())
@recoverable(CHECKING)
def fail_run(  # noqa: PLR0913  # Flyte asks for every input of the workflow, and for the error
    recipe: str,
    overrides: list[str],
    run_root: str,
    reuse_stored: bool,
    resume_execution: str | None = None,
    workload: Workload | None = None,
    num_steps: int | None = None,
    seed: int | None = None,
    max_off_policy_steps: int | None = None,
    arms: Arms = Arms.BOTH,
    err: FlyteError | None = None,
) -> None:
    """Write failure.md and failure.json beside the execution's stages, and as artifacts of its MLflow run."""
    del workload, num_steps, seed, overrides, max_off_policy_steps, arms, reuse_stored
    _fail(resume_execution or execution_name(recipe), run_root, err)


@task(**on_cpus())
@recoverable(CHECKING)
def fail_certificate(  # noqa: PLR0913  # as in `fail_run`
    policy: FlyteDirectory,
    draft: FlyteDirectory,
    recipe: str,
    num_speculative_tokens: int,
    overrides: list[str],
    run_root: str,
    workload: Workload | None = None,
    seed: int | None = None,
    err: FlyteError | None = None,
) -> None:
    """Write the failure of an execution of the workflow `certify`."""
    del policy, draft, workload, num_speculative_tokens, seed, overrides
    end_failed(recipe, run_root, err, stages=("prepare_data", "certify_losslessness"))


def end_failed(recipe: str, run_root: str, error: FlyteError | None, *, stages: tuple[str, ...]) -> None:
    """Write the failure of an execution that cannot be resumed, and has these stages."""
    _fail(execution_name(recipe), run_root, error, stages)


def _fail(execution: str, run_root: str, error: FlyteError | None, stages: tuple[str, ...] = ()) -> None:
    stage.fail_run(root_of(run_root), execution, message=error.message if error is not None else "", stages=stages)
