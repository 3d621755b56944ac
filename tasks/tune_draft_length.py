"""Choose the draft length by measured time."""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs, stages
from slipstream.context import RunContext
from slipstream.recipe import load_recipe
from tasks.resources import IMAGE, LARGE, RETRIES


@task(container_image=IMAGE, requests=LARGE, retries=RETRIES)
def tune_draft_length(
    context: RunContext, recipe: FlyteFile, policy: FlyteDirectory, data: FlyteDirectory, draft: FlyteDirectory
) -> FlyteDirectory:
    """tuning.json: every point of the sweep, the chosen k, and a schedule by batch size."""
    logs.configure()
    loaded = load_recipe(str(recipe))
    return FlyteDirectory(str(stages.tune_draft_length(context, loaded, Path(policy), Path(data), Path(draft))))
