"""Bring the records of a run together in one page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream import logs
from slipstream.recipe import load_recipe
from slipstream.stages import report_speedup as stage
from slipstream.stages.context import RunContext
from tasks.resources import CHECKING, on_cpus


class SpeedupReport(NamedTuple):
    """Output of the report."""

    report: FlyteDirectory


@task(**on_cpus(CHECKING), enable_deck=True, deck_fields=())
def report_speedup(  # noqa: PLR0913  # one input a record
    context: RunContext,
    recipe: FlyteFile,
    policy: FlyteDirectory,
    data: FlyteDirectory,
    draft: FlyteDirectory,
    tuning: FlyteDirectory,
    arms: list[FlyteDirectory],
    evaluations: list[FlyteDirectory],
    certificate: FlyteDirectory,
    projection: FlyteDirectory,
) -> SpeedupReport:
    """report.html, which is also the task's deck, report.json and run.json."""
    logs.configure()
    directory = stage.report_speedup(
        context,
        load_recipe(os.fspath(recipe)),
        policy=Path(policy),
        data=Path(data),
        draft=Path(draft),
        tuning=Path(tuning),
        arms=[Path(arm) for arm in arms],
        evaluations=[Path(evaluation) for evaluation in evaluations],
        certificate=Path(certificate),
        projection=Path(projection),
    )
    Deck("speedup", (directory / "report.html").read_text())
    return SpeedupReport(report=FlyteDirectory(str(directory)))
