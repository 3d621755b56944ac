"""Check the recipe and open the run that all other tasks belong to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.recipe import load_recipe, write_recipe
from slipstream.stages.context import RunContext
from slipstream.tracking import Tracker
from slipstream.types import Workload

logger = logging.getLogger(__name__)


def start_run(
    recipe_name: str, *, workload: Workload | None, root: Path, execution: str, overrides: Mapping[str, Any]
) -> tuple[RunContext, Path]:
    """Check the whole recipe before anything expensive starts, write it out in full, and open the parent run."""
    recipe = load_recipe(recipe_name, workload=workload, overrides=overrides)
    context = RunContext(
        execution=execution, root=str(root.resolve()), experiment=recipe.name, workload=recipe.workload.value
    )
    resolved = write_recipe(recipe, context.directory("start_run") / "recipe.yaml")
    with Tracker.open(
        recipe.tracking,
        root=root.resolve(),
        experiment=recipe.name,
        key=execution,
        name=execution,
        tags={"workload": recipe.workload.value, "seed": str(recipe.grpo.seed)},
    ) as tracker:
        tracker.log_artifact(resolved)
    logger.info("run %s: recipe %s, workload %s", execution, recipe.name, recipe.workload.value)
    return context, resolved
