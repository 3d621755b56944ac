"""What a cluster lacks, asked from inside, before a run waits for it."""

# Inside a workflow a task gives promises, which flytekit types as a union of all that a task may give anywhere.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from flytekit import workflow

from tasks.preflight import Findings, require_ready
from tasks.preflight import preflight as ask
from tasks.resources import CLUSTER


@workflow
def preflight(run_root: str = CLUSTER.run_root, timeout_s: float = 10.0) -> Findings:
    """Look for everything that the runs of this cluster's profile need; fails with a table where something is missing.

    Args:
        run_root: absolute directory on the volume that all pods share, which a pod tries to write to.
        timeout_s: seconds that each question to the Kubernetes API and to MLflow may take.

    Returns:
        findings: findings.json, a row a check: what, found, needed, state, fix.
    """
    found = ask(run_root=run_root, timeout_s=timeout_s).with_overrides(name="ask the cluster", node_name="preflight")
    return require_ready(findings=found.findings).with_overrides(name="require ready", node_name="require-ready")
