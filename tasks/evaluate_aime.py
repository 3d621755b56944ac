"""Task that measures the accuracy of a run's policies on the validation problems."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import evaluate_aime as stage
from slipstream.stages.context import RunContext
from tasks.deliverables import handed_on, model_of, recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import MEASURING, on_gpus


class Evaluations(NamedTuple):
    """Output of the evaluation: a directory with evaluation.json for each policy, the policy before RL first."""

    evaluations: list[FlyteDirectory]


@task(**on_gpus())
@recoverable(3 * MEASURING)
def evaluate_aime(
    context: RunContext,
    recipe: FlyteFile,
    data: FlyteDirectory,
    policy: FlyteDirectory,
    arms: list[list[FlyteDirectory]],
) -> Evaluations:
    """Evaluate the policy before RL, then the trained policy of each arm of each loop, one after the other.

    The weights of an arm lie in `policy/` of its directory.
    """
    trained = [model_of(context, arm) for loop in arms for arm in loop]
    models = {stage.START: model_of(context, policy), **{stage.trained_name(arm): arm / "policy" for arm in trained}}
    found: list[FlyteDirectory] = []
    for name, model in models.items():
        directory = stage.evaluate_aime(context, recipe_of(recipe), name, data=records_of(data), model=model)
        found.append(handed_on(context, f"evaluate_aime_{name}", directory, records=("evaluation.json",)))
    return Evaluations(evaluations=found)
