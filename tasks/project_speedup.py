"""Task that projects speedups: to other draft lengths on this machine, and to the clusters of published figures."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import project_speedup as stage
from slipstream.stages.context import RunContext
from tasks.deliverables import handed_on, recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, on_cpus


class Projection(NamedTuple):
    """Output of the projection: the directory of projection.json."""

    projection: FlyteDirectory


@task(**on_cpus())
@recoverable(CHECKING)
def project_speedup(
    context: RunContext, recipe: FlyteFile, tuning: FlyteDirectory | None, arms: list[list[FlyteDirectory]]
) -> Projection:
    """Write calibrations, the check on the speculative arm and projections with bands to projection.json."""
    directory = stage.project_speedup(
        context,
        recipe_of(recipe),
        tuning=None if tuning is None else records_of(tuning),
        arms=[records_of(arm) for loop in arms for arm in loop],
    )
    return Projection(projection=handed_on(context, "project_speedup", directory, records=("projection.json",)))
