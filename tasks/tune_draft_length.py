"""Task that chooses the draft length by measured time."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import tune_draft_length as stage
from slipstream.stages.context import RunContext
from tasks.deliverables import handed_on, model_of, recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import MEASURING, on_gpus


class Tuning(NamedTuple):
    """Output of the sweep: the directory of tuning.json; None without a draft."""

    tuning: FlyteDirectory | None


@task(**on_gpus())
@recoverable(MEASURING)
def tune_draft_length(
    context: RunContext, recipe: FlyteFile, policy: FlyteDirectory, data: FlyteDirectory, draft: FlyteDirectory | None
) -> Tuning:
    """Measure a sweep over draft lengths; writes points, the chosen k and a schedule by batch size to tuning.json."""
    if draft is None:
        return Tuning(tuning=None)
    loaded = recipe_of(recipe)
    directory = stage.tune_draft_length(
        context, loaded, policy=model_of(context, policy), data=records_of(data), draft=model_of(context, draft)
    )
    return Tuning(tuning=handed_on(context, "tune_draft_length", directory, records=("tuning.json", "sweep.svg")))
