"""Load, filter and tokenize the prompt sets."""

from __future__ import annotations

import os

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.recipe import load_recipe
from slipstream.stages import prepare_data as stage
from slipstream.stages.context import RunContext
from tasks.deliverables import handed_on, records_of
from tasks.recoverable import recoverable
from tasks.resources import CACHE, IMAGE, RETRIES, SMALL

_RECORDS = ("*.jsonl", "manifest.json", "tokenizer/*")


@task(container_image=IMAGE, requests=SMALL, retries=RETRIES, cache=CACHE)
@recoverable
def prepare_data(context: RunContext, recipe: FlyteFile) -> FlyteDirectory:
    """The train, draft and validation prompts, their manifest, and under `tokenizer/` the recipe's tokenizer."""
    logs.configure()
    directory = stage.prepare_data(context, load_recipe(os.fspath(recipe)))
    return handed_on(context, "prepare_data", directory, records=_RECORDS)


@task(container_image=IMAGE, requests=SMALL, retries=RETRIES, cache=CACHE)
@recoverable
def prepare_data_for(context: RunContext, recipe: FlyteFile, policy: FlyteDirectory) -> FlyteDirectory:
    """The same with the tokenizer of `policy`, which may be another model than the recipe's."""
    logs.configure()
    directory = stage.prepare_data(context, load_recipe(os.fspath(recipe)), policy=records_of(policy))
    return handed_on(context, "prepare_data", directory, records=_RECORDS)
