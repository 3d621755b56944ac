"""Tasks of the preflight: check from a pod that the cluster has everything that runs of its profile need."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, current_context, task
from flytekit.types.file import FlyteFile

from slipstream.kubernetes import preflight as stage
from slipstream.records.files import read_record, write_record
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, CLUSTER, on_cpus, root_of


class Findings(NamedTuple):
    """Output of a preflight: findings.json."""

    findings: FlyteFile


@task(**on_cpus(calls_api=True), enable_deck=True, deck_fields=())
@recoverable(CHECKING)
def preflight(run_root: str, timeout_s: float) -> Findings:
    """Check the cluster in findings.json; the task's deck is a table of what, found, needed and fix."""
    record = stage.preflight(CLUSTER, root=root_of(run_root), timeout_s=timeout_s)
    Deck("preflight", f"<pre>{html.escape(record.table)}</pre>")
    path = Path(current_context().working_directory) / "findings.json"
    return Findings(findings=FlyteFile(str(write_record(record, path))))


@task(**on_cpus(retries=0))
@recoverable(CHECKING)
def require_ready(findings: FlyteFile) -> Findings:
    """Return the findings, or fail if something is missing; the table is written before."""
    stage.require_ready(read_record(stage.PreflightRecord, Path(os.fspath(findings))))
    return Findings(findings=findings)
