"""Project the measured speedup: to other draft lengths here, and from the published figures to their clusters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.recipe import load_recipe
from slipstream.stages import project_speedup as stage
from slipstream.stages.context import RunContext
from tasks.resources import CHECKING, on_cpus


class Projection(NamedTuple):
    """Output of the projection."""

    projection: FlyteDirectory


@task(**on_cpus(CHECKING))
def project_speedup(
    context: RunContext, recipe: FlyteFile, tuning: FlyteDirectory, arms: list[FlyteDirectory]
) -> Projection:
    """projection.json: calibrations, predicted beside measured for the speculative arm, projections with bands."""
    logs.configure()
    directory = stage.project_speedup(
        context, load_recipe(os.fspath(recipe)), tuning=Path(tuning), arms=[Path(arm) for arm in arms]
    )
    return Projection(projection=FlyteDirectory(str(directory)))
