"""Ask the cluster what it lacks for the runs of its profile, from one of its own pods."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, current_context, task
from flytekit.types.file import FlyteFile

from slipstream.kubernetes import preflight as stage
from slipstream.kubernetes.profile import shared_root
from slipstream.records.files import read_record, write_record
from tasks.recoverable import recoverable
from tasks.resources import CHECKING, CLUSTER, on_cpus, on_cpus_with_token, runs_locally


class Findings(NamedTuple):
    """Output of a preflight."""

    findings: FlyteFile


@task(**on_cpus_with_token(CHECKING), enable_deck=True, deck_fields=())
@recoverable
def preflight(run_root: str, timeout_s: float) -> Findings:
    """findings.json, and as the task's deck the table: what, found, needed, fix."""
    root = shared_root(run_root, CLUSTER, is_local=runs_locally())
    record = stage.preflight(CLUSTER, root=root, timeout_s=timeout_s)
    Deck("preflight", f"<pre>{html.escape(record.table)}</pre>")
    path = Path(current_context().working_directory) / "findings.json"
    return Findings(findings=FlyteFile(str(write_record(record, path))))


@task(**on_cpus(CHECKING, retries=0))
@recoverable
def require_ready(findings: FlyteFile) -> Findings:
    """The findings, unless something is missing: this comes last, so that there is a table to read."""
    stage.require_ready(read_record(stage.PreflightRecord, Path(os.fspath(findings))))
    return Findings(findings=findings)
