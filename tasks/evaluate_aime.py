"""Task that measures the accuracy of one policy on the validation problems."""

from __future__ import annotations

import os
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.recipe import load_recipe
from slipstream.stages import evaluate_aime as stage
from slipstream.stages.context import RunContext
from tasks.deliverables import handed_on, model_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import MEASURING, on_gpus


class Evaluation(NamedTuple):
    """Output of an evaluation: the directory of evaluation.json."""

    evaluation: FlyteDirectory


@task(**on_gpus(MEASURING))
@recoverable
def evaluate_aime(
    context: RunContext, recipe: FlyteFile, data: FlyteDirectory, model: FlyteDirectory, policy: str
) -> Evaluation:
    """Evaluate a policy in evaluation.json.

    `policy` is the name `start` or that of an arm; the weights of an arm lie in `policy/` of `model`.
    """
    path = model_of(context, model)
    weights = path / "policy" if (path / "policy").is_dir() else path
    loaded = load_recipe(os.fspath(recipe))
    directory = stage.evaluate_aime(context, loaded, policy, data=records_of(data), model=weights)
    return Evaluation(evaluation=handed_on(context, f"evaluate_aime_{policy}", directory, records=("evaluation.json",)))
