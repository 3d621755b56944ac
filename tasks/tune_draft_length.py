"""Choose the draft length by measured time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.recipe import load_recipe
from slipstream.stages import tune_draft_length as stage
from slipstream.stages.context import RunContext
from tasks.resources import MEASURING, on_gpus


class Tuning(NamedTuple):
    """Output of the sweep."""

    tuning: FlyteDirectory


@task(**on_gpus(MEASURING))
def tune_draft_length(
    context: RunContext, recipe: FlyteFile, policy: FlyteDirectory, data: FlyteDirectory, draft: FlyteDirectory
) -> Tuning:
    """tuning.json: every point of the sweep, the chosen k, and a schedule by batch size."""
    logs.configure()
    loaded = load_recipe(os.fspath(recipe))
    directory = stage.tune_draft_length(context, loaded, policy=Path(policy), data=Path(data), draft=Path(draft))
    return Tuning(tuning=FlyteDirectory(str(directory)))
