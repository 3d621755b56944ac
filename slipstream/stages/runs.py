"""The MLflow runs of an execution and of its tasks: opened once, found again by a retry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slipstream import interrupts
from slipstream.recipe import Recipe
from slipstream.stages.context import RunContext
from slipstream.stages.origin import origin_tags
from slipstream.tracking import EXECUTION, GPUS_TAG, KIND_TAG, PART, RunStatus, Tracker, has_ended
from slipstream.types import Dtype

_WITHOUT_GPUS = ("start_run", "prepare_data", "report_speedup")


@contextmanager
def tracked(
    context: RunContext,
    recipe: Recipe,
    node: str,
    tags: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    params: Mapping[str, str] | None = None,
    gpu: str = "",
) -> Iterator[Tracker]:
    """The MLflow run of a task, below the execution's; a retried task finds the one of its first attempt.

    An exception or an interrupt ends the execution's run too; an attempt after that opens it again.

    Args:
        name: of the run; the node's if None.
        gpu: the type of the accelerators that the task uses.
    """
    interrupts.raise_on_signals()
    if has_ended(Path(context.root), experiment_name(context, recipe), context.execution):
        execution_run(context, recipe).detach()
    try:
        with Tracker.open(
            recipe.tracking,
            root=Path(context.root),
            experiment=context.experiment,
            key=context.key(node),
            parent_key=context.execution,
            name=name or node,
            tags={
                "workload": context.workload,
                "seed": str(recipe.grpo.seed),
                GPUS_TAG: str(num_gpus(recipe, node)),
                **dtype_tags(recipe),
                **origin_tags(gpu=gpu),
                **(tags or {}),
            },
            params=params,
        ) as tracker:
            try:
                yield tracker
            except (KeyboardInterrupt, SystemExit):
                interrupts.ignore_signals()
                raise
    except BaseException as error:
        execution_run(context, recipe).close(RunStatus.of_error(type(error)))
        raise


def dtype_tags(recipe: Recipe) -> dict[str, str]:
    """In what the task computes; a task that computes nothing runs before an `auto` is settled, and has none."""
    dtypes = {"dtype.learner": recipe.learner.dtype, "dtype.engine": recipe.engine.dtype}
    return {name: dtype.value for name, dtype in dtypes.items() if dtype is not Dtype.AUTO}


def num_gpus(recipe: Recipe, node: str) -> int:
    """GPUs that are reserved while the task `node` runs."""
    uses_none = node in _WITHOUT_GPUS or (node == "prepare_policy" and recipe.policy.scratch is None)
    return 0 if uses_none or not recipe.layout.has_gpus else recipe.layout.num_gpus


def experiment_name(context: RunContext, recipe: Recipe) -> str:
    """The MLflow experiment of an execution's runs."""
    return recipe.tracking.experiment or context.experiment


def execution_run(
    context: RunContext,
    recipe: Recipe,
    tags: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
) -> Tracker:
    """The MLflow run of the execution, to which those of its tasks belong: opened, or attached to.

    That of a part of an ablation lies below the ablation's.
    """
    kind = PART if context.part_of else EXECUTION
    return Tracker.open(
        recipe.tracking,
        root=Path(context.root),
        experiment=context.experiment,
        key=context.execution,
        parent_key=context.part_of or None,
        name=context.execution.rpartition("/")[2],
        tags={"workload": context.workload, "seed": str(recipe.grpo.seed), KIND_TAG: kind, **(tags or {})},
        params=params,
    )
