"""Task that resolves the policy, or trains the recipe's own from random weights."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import prepare_policy as stage
from slipstream.stages.context import RunContext
from slipstream.stages.prepare_policy import POLICY_RECORDS
from tasks.deliverables import handed_on, recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import PREPARING, on_cpus


class Policy(NamedTuple):
    """Output of the preparation: the directory of the model."""

    policy: FlyteDirectory


@task(**on_cpus())
@recoverable(PREPARING)
def prepare_policy(context: RunContext, recipe: FlyteFile, data: FlyteDirectory) -> Policy:
    """Prepare a model directory in Hugging Face format, with its tokenizer and policy.json."""
    directory = stage.prepare_policy(context, recipe_of(recipe), data=records_of(data))
    return Policy(policy=handed_on(context, "prepare_policy", directory, records=POLICY_RECORDS, weights=(".",)))
