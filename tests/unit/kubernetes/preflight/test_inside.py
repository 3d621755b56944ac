"""A preflight from a pod: it asks as the command does, and tries the root itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config import ConfigError
from slipstream.kubernetes.preflight.inside import check_inside, own_namespace, require_ready
from slipstream.kubernetes.preflight.needs import Finding, State
from slipstream.kubernetes.profile import read_profile
from slipstream.records.files import read_record, write_record
from tests.unit.kubernetes.preflight.api_server import NAMESPACE, serving, whole_cluster


def by_name(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_the_root_is_written_to_here_and_no_pod_is_started_for_it(tmp_path: Path) -> None:
    cluster = whole_cluster()
    with serving(cluster) as (api, _):
        record = check_inside(read_profile("gb200"), api, namespace=NAMESPACE, root=tmp_path / "runs")

    row = by_name(record.findings)["shared root"]
    assert (row.state, row.found) == (State.FINE, "written, read and removed")
    assert list((tmp_path / "runs").iterdir()) == []
    created = [request for request, _ in cluster.asked if request.startswith("POST") and "/pods" in request]
    assert created and all("dryRun=All" in request for request in created)
    assert not [request for request, _ in cluster.asked if "selfsubjectaccessreviews" in request]
    assert "localqueues.kueue.x-k8s.io" in record.table
    assert read_record(type(record), write_record(record, tmp_path / "findings.json")) == record
    with pytest.raises(ConfigError, match=r"cluster gb200 lacks \d of what its runs need:\n(.|\n)*install Kueue"):
        require_ready(record)


def test_a_root_that_this_user_cannot_write_to_is_missing_and_says_how_to_fix_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serving(whole_cluster()) as (api, _):
        record = check_inside(read_profile("gb200"), api, namespace=NAMESPACE, root=tmp_path / "file" / "runs")

    row = by_name(record.findings)["shared root"]
    assert (row.state, row.fix) == (
        State.MISSING,
        "chown the volume's root to group 1000, or set fsGroup to its group",
    )
    assert "Not a directory" in row.found


def test_the_namespace_is_the_pods_own(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("slipstream-development\n")
    assert own_namespace(tmp_path / "namespace") == "slipstream-development"
    with pytest.raises(ConfigError, match="preflight must run in a pod with a service account's token, got 'no "):
        own_namespace(tmp_path / "none")
