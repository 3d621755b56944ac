"""Task that fails an execution whose results drifted, because Flyte notifies only of how executions end."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from slipstream.stages import report_speedup as stage
from tasks.certify_losslessness import Report
from tasks.deliverables import recipe_of, records_of
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, on_cpus


@task(**on_cpus(retries=0))
@recoverable(CHECKING)
def require_no_drift(recipe: FlyteFile, report: FlyteDirectory) -> Report:
    """Return the report, or fail if results drifted and tracking.drift.fail is set; the report is written before."""
    stage.require_no_drift(recipe_of(recipe), records_of(report))
    return Report(report=report)
