"""Task that trains the arms of a loop with GRPO: the synchronous loop, or the recipe's asynchronous one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import train_grpo as stage
from slipstream.stages.context import RunContext, arm_node
from slipstream.types import ArmLoop, Arms
from tasks.deliverables import handed_on, model_of, recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import TRAINING, on_gpus


class Trained(NamedTuple):
    """Output of the training: a directory for each arm, the baseline first."""

    trained: list[FlyteDirectory]


@task(**on_gpus())
@recoverable(TRAINING)
def train_grpo(
    context: RunContext,
    recipe: FlyteFile,
    policy: FlyteDirectory,
    data: FlyteDirectory,
    draft: FlyteDirectory | None,
    tuning: FlyteDirectory | None,
    arms: Arms,
    loop: ArmLoop,
) -> Trained:
    """Train the arms of a loop; only a speculative arm needs draft and tuning.

    Each arm's directory holds arm.json with every step, the final policy in `policy/` and, if the draft learned during
    RL, the draft in `draft/`. A retry resumes all arms from their last checkpoints.
    """
    directories = stage.train_grpo(
        context,
        recipe_of(recipe),
        arms.members,
        policy=model_of(context, policy),
        data=records_of(data),
        draft=None if draft is None else model_of(context, draft),
        tuning=None if tuning is None else records_of(tuning),
        loop=loop,
    )
    return Trained(
        trained=[_arm(context, arm_node(arm, loop), path) for arm, path in zip(arms.members, directories, strict=True)]
    )


def _arm(context: RunContext, node: str, directory: Path) -> FlyteDirectory:
    weights = [name for name in ("policy", "draft") if name == "policy" or (directory / name).is_dir()]
    return handed_on(context, node, directory, records=("arm.json",), weights=weights)
