"""Resolve the policy, or train the recipe's own from random weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.recipe import load_recipe
from slipstream.stages import prepare_policy as stage
from slipstream.stages.context import RunContext
from tasks.resources import CACHE, PREPARING, on_cpus


class Policy(NamedTuple):
    """Output of the preparation."""

    policy: FlyteDirectory


@task(**on_cpus(PREPARING), cache=CACHE)
def prepare_policy(context: RunContext, recipe: FlyteFile, data: FlyteDirectory) -> Policy:
    """A model directory in Hugging Face format, with its tokenizer and policy.json."""
    logs.configure()
    directory = stage.prepare_policy(context, load_recipe(os.fspath(recipe)), data=Path(data))
    return Policy(policy=FlyteDirectory(str(directory)))
