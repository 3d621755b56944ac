"""Task that writes the report of a run."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import report_speedup as stage
from slipstream.stages.context import RunContext
from tasks.deliverables import handed_on, recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, on_cpus


class SpeedupReport(NamedTuple):
    """Output of the report: the directory of its files."""

    report: FlyteDirectory


@task(**on_cpus(), enable_deck=True, deck_fields=())
@recoverable(CHECKING)
def report_speedup(  # noqa: PLR0913  # one input a record
    context: RunContext,
    recipe: FlyteFile,
    policy: FlyteDirectory,
    data: FlyteDirectory,
    draft: FlyteDirectory | None,
    tuning: FlyteDirectory | None,
    arms: list[list[FlyteDirectory]],
    evaluations: list[FlyteDirectory],
    certificate: FlyteDirectory | None,
    projection: FlyteDirectory,
) -> SpeedupReport:
    """Write report.html (also the task's deck), report.json, run.json and drift.json from a run's records."""
    directory = stage.report_speedup(
        context,
        recipe_of(recipe),
        policy=records_of(policy),
        data=records_of(data),
        draft=None if draft is None else records_of(draft),
        tuning=None if tuning is None else records_of(tuning),
        arms=[records_of(arm) for loop in arms for arm in loop],
        evaluations=[records_of(evaluation) for evaluation in evaluations],
        certificate=None if certificate is None else records_of(certificate),
        projection=records_of(projection),
    )
    Deck("speedup", (directory / "report.html").read_text())
    records = ("report.html", "report.json", "run.json", "drift.json")
    return SpeedupReport(report=handed_on(context, "report_speedup", directory, records=records))
