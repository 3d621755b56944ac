"""Task that trains the draft on the policy's own responses, or resolves a pretrained draft."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import pretrain_draft as stage
from slipstream.stages.context import RunContext
from tasks.deliverables import handed_on, model_of, recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import MEASURING, on_gpus


class Draft(NamedTuple):
    """Output of the pretraining: the directory of the draft; None without a speculative arm."""

    draft: FlyteDirectory | None


@task(**on_gpus())
@recoverable(MEASURING)
def pretrain_draft(context: RunContext, recipe: FlyteFile, policy: FlyteDirectory, data: FlyteDirectory) -> Draft:
    """Pretrain the draft; writes draft.json and, if the method has weights, a draft for vLLM in `draft/`."""
    if not context.speculates:
        return Draft(draft=None)
    directory = stage.pretrain_draft(
        context, recipe_of(recipe), policy=model_of(context, policy), data=records_of(data)
    )
    weights = ("draft",) if (directory / "draft").is_dir() else ()
    return Draft(draft=handed_on(context, "pretrain_draft", directory, records=("draft.json",), weights=weights))
