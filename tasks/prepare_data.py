"""Tasks that load, filter and tokenize the prompt sets."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import prepare_data as stage
from slipstream.stages.context import RunContext
from tasks.deliverables import handed_on, recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import PREPARING, on_cpus

_RECORDS = ("*.jsonl", "manifest.json", "tokenizer/*")


class Data(NamedTuple):
    """Output of the preparation: the directory of the prompt sets."""

    data: FlyteDirectory


@task(**on_cpus())
@recoverable(PREPARING)
def prepare_data(context: RunContext, recipe: FlyteFile) -> Data:
    """Prepare train, draft and validation prompts, their manifest and, in `tokenizer/`, the recipe's tokenizer."""
    directory = stage.prepare_data(context, recipe_of(recipe), trains_draft=context.speculates)
    return Data(data=handed_on(context, "prepare_data", directory, records=_RECORDS))


@task(**on_cpus())
@recoverable(PREPARING)
def prepare_data_for(context: RunContext, recipe: FlyteFile, policy: FlyteDirectory) -> Data:
    """Prepare the prompt sets, on which no draft is trained, with the tokenizer of `policy`, not the recipe's model."""
    directory = stage.prepare_data(context, recipe_of(recipe), policy=records_of(policy), trains_draft=False)
    return Data(data=handed_on(context, "prepare_data", directory, records=_RECORDS))
