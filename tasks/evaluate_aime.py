"""Task that measures the accuracy of the policies of a run on the validation problems."""

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


class Evaluated(NamedTuple):
    """Output of the evaluations: a directory of evaluation.json for the policy before RL, then for each arm."""

    evaluations: list[FlyteDirectory]


@task(**on_gpus())
@recoverable(3 * MEASURING)
def evaluate_aime(
    context: RunContext,
    recipe: FlyteFile,
    data: FlyteDirectory,
    policy: FlyteDirectory,
    arms: list[FlyteDirectory],
    names: list[str],
) -> Evaluated:
    """Evaluate the policy before RL, then each arm, whose weights lie in `policy/`; a retry keeps what is finished.

    One task evaluates all of them, because each Ray cluster takes a minute to start.
    """
    loaded, records = load_recipe(os.fspath(recipe)), records_of(data)
    found = []
    for name, model in zip(("start", *names), (policy, *arms), strict=True):
        path = model_of(context, model)
        weights = path / "policy" if (path / "policy").is_dir() else path
        directory = stage.evaluate_aime(context, loaded, name, data=records, model=weights)
        found.append(handed_on(context, f"evaluate_aime_{name}", directory, records=("evaluation.json",)))
    return Evaluated(evaluations=found)
