"""Measure the accuracy of one policy on the validation problems."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.recipe import load_recipe
from slipstream.stages import evaluate_aime as stage
from slipstream.stages.context import RunContext
from tasks.resources import MEASURING, on_gpus


class Evaluation(NamedTuple):
    """Output of an evaluation."""

    evaluation: FlyteDirectory


@task(**on_gpus(MEASURING))
def evaluate_aime(
    context: RunContext, recipe: FlyteFile, data: FlyteDirectory, model: FlyteDirectory, policy: str
) -> Evaluation:
    """evaluation.json. `policy` names the weights: `start`, or an arm, whose directory holds them as `policy/`."""
    logs.configure()
    path = Path(model)
    weights = path / "policy" if (path / "policy").is_dir() else path
    loaded = load_recipe(os.fspath(recipe))
    directory = stage.evaluate_aime(context, loaded, policy, data=Path(data), model=weights)
    return Evaluation(evaluation=FlyteDirectory(str(directory)))
