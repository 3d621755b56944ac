"""Train the draft on the policy's own responses."""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs, stages
from slipstream.context import RunContext
from slipstream.recipe import load_recipe
from tasks.resources import CACHE, IMAGE, LARGE, RETRIES


@task(container_image=IMAGE, requests=LARGE, retries=RETRIES, cache=CACHE)
def pretrain_draft(
    context: RunContext, recipe: FlyteFile, policy: FlyteDirectory, data: FlyteDirectory
) -> FlyteDirectory:
    """A draft that vLLM loads, under `draft/`, and draft.json."""
    logs.configure()
    return FlyteDirectory(str(stages.pretrain_draft(context, load_recipe(str(recipe)), Path(policy), Path(data))))
