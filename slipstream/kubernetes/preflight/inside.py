"""A preflight from one of the cluster's own pods, which sees what the tasks will see: the volume, MLflow, the API."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.config import ConfigError, require
from slipstream.kubernetes.preflight.api import Api, connect
from slipstream.kubernetes.preflight.checks import check, findings_table, num_missing
from slipstream.kubernetes.preflight.needs import Finding
from slipstream.kubernetes.preflight.profile_needs import needs_of
from slipstream.kubernetes.profile import ClusterProfile

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where Kubernetes tells a pod in which namespace it runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightRecord:
    """What a preflight found."""

    cluster: str
    namespace: str
    findings: tuple[Finding, ...]

    @property
    def table(self) -> str:
        """Plain text, what is missing first."""
        return findings_table(self.findings)


def preflight(profile: ClusterProfile, *, root: Path, timeout_s: float) -> PreflightRecord:
    """Ask the cluster that this pod runs in.

    Raises:
        ConfigError: this is no pod with a service account's token; or the profile is of this machine.
    """
    namespace = own_namespace()
    return check_inside(profile, connect(context=None, timeout_s=timeout_s), namespace=namespace, root=root)


def own_namespace(path: Path = NAMESPACE_FILE) -> str:
    """The namespace of this pod.

    Raises:
        ConfigError: no token of a service account is mounted here.
    """
    require(path.is_file(), "preflight", "must run in a pod with a service account's token", f"no {path}")
    return path.read_text().strip()


def check_inside(profile: ClusterProfile, api: Api, *, namespace: str, root: Path) -> PreflightRecord:
    """Ask all that `slipstream preflight` asks, but for what this pod knows better.

    What the caller may do is not asked, for Flyte and KubeRay make the pods of a run, not this pod's account; and
    whether `root` can be written to is tried here, as the user and group of every task, without another pod.
    """
    needs = replace(needs_of(profile, namespace=namespace, image=None), permissions=(), own_root=root)
    return PreflightRecord(cluster=profile.name, namespace=namespace, findings=tuple(check(api, needs)))


def require_ready(record: PreflightRecord) -> None:
    """Refuse a cluster that lacks something.

    Raises:
        ConfigError: with the table.
    """
    missing = num_missing(record.findings)
    if missing:
        raise ConfigError(f"cluster {record.cluster} lacks {missing} of what its runs need:\n{record.table}")
