"""Train one arm with GRPO, in the synchronous loop or the recipe's own."""

from __future__ import annotations

import os
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.recipe import load_recipe
from slipstream.stages import train_grpo as stage
from slipstream.stages.context import RunContext, arm_node
from slipstream.types import Arm, ArmLoop
from tasks.deliverables import handed_on, model_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import TRAINING, on_gpus


class Trained(NamedTuple):
    """Output of an arm."""

    trained: FlyteDirectory


@task(**on_gpus(TRAINING))
@recoverable
def train_grpo(
    context: RunContext,
    recipe: FlyteFile,
    policy: FlyteDirectory,
    data: FlyteDirectory,
    draft: FlyteDirectory,
    tuning: FlyteDirectory,
    arm: Arm,
    loop: ArmLoop,
) -> Trained:
    """arm.json with every step, the final policy under `policy/`, and under `draft/` a draft that learned beside it.

    A retry goes on from the last checkpoint.
    """
    loaded = load_recipe(os.fspath(recipe))
    directory = stage.train_grpo(
        context,
        loaded,
        arm,
        policy=model_of(context, policy),
        data=records_of(data),
        draft=model_of(context, draft),
        tuning=records_of(tuning),
        loop=loop,
    )
    weights = [name for name in ("policy", "draft") if name == "policy" or (directory / name).is_dir()]
    return Trained(trained=handed_on(context, arm_node(arm, loop), directory, records=("arm.json",), weights=weights))
