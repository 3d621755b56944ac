"""Train the draft on the policy's own responses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.recipe import load_recipe
from slipstream.stages import pretrain_draft as stage
from slipstream.stages.context import RunContext
from tasks.resources import CACHE, MEASURING, on_gpus


class Draft(NamedTuple):
    """Output of the training."""

    draft: FlyteDirectory


@task(**on_gpus(MEASURING), cache=CACHE)
def pretrain_draft(context: RunContext, recipe: FlyteFile, policy: FlyteDirectory, data: FlyteDirectory) -> Draft:
    """A draft that vLLM loads, under `draft/`, and draft.json."""
    logs.configure()
    directory = stage.pretrain_draft(context, load_recipe(os.fspath(recipe)), policy=Path(policy), data=Path(data))
    return Draft(draft=FlyteDirectory(str(directory)))
