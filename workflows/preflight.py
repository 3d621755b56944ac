"""Workflow `preflight`: checks from inside a cluster that nothing is missing for the runs of its profile."""

# Inside a workflow a task returns promises, which flytekit types as a union of all return types of a task.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from slipstream.kubernetes.pods import PREFLIGHT_ACCOUNT
from tasks.preflight import Findings, require_ready
from tasks.preflight import preflight as ask
from tasks.resources import CLUSTER
from workflows.on_cluster import named, workflow


@workflow(account=PREFLIGHT_ACCOUNT)
def preflight(run_root: str = CLUSTER.run_root, timeout_s: float = 10.0) -> Findings:
    """Check everything that runs of this cluster's profile need, and fail with a table if something is missing.

    One small pod asks the Kubernetes API and MLflow, and writes to the shared volume. Launch it first on a new cluster.

    Args:
        run_root: absolute directory on the shared volume of all pods; a pod tests that it can write there.
        timeout_s: time limit of each request to the Kubernetes API and to MLflow, in seconds.

    Returns:
        findings: findings.json, with what, found, needed, state and fix of each check.
    """
    found = named(ask(run_root=run_root, timeout_s=timeout_s), "ask the cluster", "preflight")
    return named(require_ready(findings=found.findings), "require ready", "require-ready")
