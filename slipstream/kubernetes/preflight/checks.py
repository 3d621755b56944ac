"""Every check in turn, and the table of what they found."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence

from slipstream.kubernetes.preflight.api import Api
from slipstream.kubernetes.preflight.limits import check_permissions, check_pods, check_quota
from slipstream.kubernetes.preflight.needs import Finding, Needs, State
from slipstream.kubernetes.preflight.nodes import check_nodes
from slipstream.kubernetes.preflight.objects import (
    check_claim,
    check_claim_template,
    check_crds,
    check_secrets,
    check_service_account,
)
from slipstream.kubernetes.preflight.probe import check_own_root, check_root
from slipstream.workers.placement.table import table


def check(api: Api, needs: Needs) -> list[Finding]:
    """Ask everything; a check that the cluster refuses or leaves unanswered is a finding like any other."""
    findings: list[Finding] = []
    if needs.gpu_nodes is not None:
        findings += check_nodes(api, needs.gpu_nodes)
    findings += check_crds(api, needs.crds)
    if needs.claim_template is not None:
        findings += check_claim_template(api, needs.namespace, needs.claim_template)
    if needs.claim is not None:
        findings += check_claim(api, needs.namespace, needs.claim)
    findings += check_secrets(api, needs.namespace, needs.secrets)
    if needs.service_account is not None:
        findings += check_service_account(api, needs.namespace, needs.service_account)
    if needs.permissions:
        findings += check_permissions(api, needs.namespace, needs.permissions)
    if needs.quota:
        findings += check_quota(api, needs.namespace, needs.quota)
    findings += check_pods(api, needs.namespace, needs.pods)
    if needs.mlflow_uri is not None:
        findings += check_mlflow(needs.mlflow_uri, timeout_s=api.timeout_s)
    if needs.own_root is not None:
        findings += check_own_root(needs.own_root, needs)
    elif needs.claim is not None:
        findings += check_root(api, needs)
    return findings


def check_mlflow(uri: str, *, timeout_s: float) -> list[Finding]:
    """MLflow's server answers on its health route, as seen from here."""
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout_s) as answer:
            found, is_fine = f"{answer.status}", answer.status == 200
    except urllib.error.HTTPError as error:
        found, is_fine = f"{error.code} {error.reason}", False
    except OSError as error:
        found, is_fine = f"no answer: {error}", False
    fix = "is the server up? an address inside the cluster answers pods alone: run the preflight from one"
    return [Finding.of(f"MLflow at {uri}", found=found, needed="200 on /health", is_fine=is_fine, fix=fix)]


def findings_table(findings: Sequence[Finding]) -> str:
    """Plain text: state, what, found, needed, fix; what is missing first."""
    order = [State.MISSING, State.UNCHECKED, State.FINE]
    rows = sorted(findings, key=lambda finding: order.index(finding.state))
    head = ["", "what", "found", "needed", "fix"]
    return table([head, *[[row.state.value, row.what, row.found, row.needed, row.fix] for row in rows]])


def num_missing(findings: Sequence[Finding]) -> int:
    """How many findings stand in the way of a run."""
    return sum(finding.state is State.MISSING for finding in findings)
