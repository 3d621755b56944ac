"""Train one arm with synchronous GRPO."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.recipe import load_recipe
from slipstream.stages import train_grpo as stage
from slipstream.stages.context import RunContext
from slipstream.types import Arm
from tasks.resources import TRAINING, on_gpus


class Trained(NamedTuple):
    """Output of an arm."""

    trained: FlyteDirectory


@task(**on_gpus(TRAINING))
def train_grpo(
    context: RunContext,
    recipe: FlyteFile,
    policy: FlyteDirectory,
    data: FlyteDirectory,
    draft: FlyteDirectory,
    tuning: FlyteDirectory,
    arm: Arm,
) -> Trained:
    """arm.json with every step, and the final policy under `policy/`; a retry goes on from the last checkpoint."""
    logs.configure()
    loaded = load_recipe(os.fspath(recipe))
    directory = stage.train_grpo(
        context, loaded, arm, policy=Path(policy), data=Path(data), draft=Path(draft), tuning=Path(tuning)
    )
    return Trained(trained=FlyteDirectory(str(directory)))
