"""Load, filter and tokenize the prompt sets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.recipe import load_recipe
from slipstream.stages import prepare_data as stage
from slipstream.stages.context import RunContext
from tasks.resources import CACHE, PREPARING, on_cpus


class Data(NamedTuple):
    """Output of the preparation."""

    data: FlyteDirectory


@task(**on_cpus(PREPARING), cache=CACHE)
def prepare_data(context: RunContext, recipe: FlyteFile) -> Data:
    """The train, draft and validation prompts, their manifest, and under `tokenizer/` the recipe's tokenizer."""
    logs.configure()
    return Data(data=FlyteDirectory(str(stage.prepare_data(context, load_recipe(os.fspath(recipe))))))


@task(**on_cpus(PREPARING), cache=CACHE)
def prepare_data_for(context: RunContext, recipe: FlyteFile, policy: FlyteDirectory) -> Data:
    """The same with the tokenizer of `policy`, which may be another model than the recipe's."""
    logs.configure()
    directory = stage.prepare_data(context, load_recipe(os.fspath(recipe)), policy=Path(policy))
    return Data(data=FlyteDirectory(str(directory)))
