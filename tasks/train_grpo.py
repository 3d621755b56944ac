"""Train one arm with synchronous GRPO."""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs, stages
from slipstream.context import RunContext
from slipstream.recipe import load_recipe
from slipstream.types import Arm
from tasks.resources import IMAGE, LARGE, RETRIES


@task(container_image=IMAGE, requests=LARGE, retries=RETRIES)
def train_grpo(
    context: RunContext,
    recipe: FlyteFile,
    policy: FlyteDirectory,
    data: FlyteDirectory,
    draft: FlyteDirectory,
    tuning: FlyteDirectory,
    arm: Arm,
) -> FlyteDirectory:
    """arm.json with every step, and the final policy under `policy/`; a retry goes on from the last checkpoint."""
    logs.configure()
    loaded = load_recipe(str(recipe))
    return FlyteDirectory(
        str(stages.train_grpo(context, loaded, Path(policy), Path(data), Path(draft), Path(tuning), arm))
    )
