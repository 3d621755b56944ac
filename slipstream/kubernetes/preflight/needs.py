"""What a run needs of a cluster, in plain values, and what was found of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream.config import require


class State(StrEnum):
    """What a check came to."""

    FINE = "fine"
    MISSING = "MISSING"
    UNCHECKED = "not checked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row: what was looked at, what was found, what is needed, and how to get there."""

    what: str
    found: str
    needed: str
    state: State
    fix: str = ""

    @classmethod
    def of(cls, what: str, *, found: str, needed: str, is_fine: bool, fix: str) -> Finding:
        """Fine without a fix, or missing with it."""
        return cls(
            what=what,
            found=found,
            needed=needed,
            state=State.FINE if is_fine else State.MISSING,
            fix="" if is_fine else fix,
        )


@dataclass(frozen=True, kw_only=True)
class GpuNodesNeed:
    """Nodes that carry one worker pod each; with a clique label all in one NVLink domain."""

    nodes: int
    labels: Mapping[str, str]  # product and architecture among them
    allocatable: Mapping[str, str]  # Kubernetes quantities a node must have, as in {"nvidia.com/gpu": "4"}
    tolerated: frozenset[str] = frozenset()  # keys of taints that the pods tolerate
    clique_label: str | None = None

    def __post_init__(self) -> None:
        require(self.nodes >= 1, "nodes", "must be >= 1", self.nodes)


@dataclass(frozen=True, kw_only=True)
class CrdNeed:
    """A custom resource and the version of it that is used."""

    name: str  # as in rayjobs.ray.io
    version: str
    provider: str  # what installs it, for the fix


@dataclass(frozen=True, kw_only=True)
class SecretNeed:
    """A secret; without `keys` any will do."""

    name: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Permission:
    """What the caller must be allowed to do in the namespace; the empty group is the core API."""

    verb: str
    resource: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Everything that a preflight asks about. What is None or empty is not asked."""

    namespace: str
    gpu_nodes: GpuNodesNeed | None = None
    claim: str | None = None  # of the shared volume
    mount_path: str = "/mnt/slipstream"
    claim_template: str | None = None  # that the ComputeDomain makes
    crds: tuple[CrdNeed, ...] = ()
    secrets: tuple[SecretNeed, ...] = ()
    service_account: str | None = None
    permissions: tuple[Permission, ...] = ()
    quota: Mapping[str, str] = field(default_factory=dict)  # all pods of a run together, as in {"requests.cpu": "1040"}
    pods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # manifests by role, for the dry run
    mlflow_uri: str | None = None
    own_root: Path | None = None  # that this process, in a pod, tries to write to instead of a pod of its own
    user: int = 1000
    group: int = 1000
    probe_image: str | None = None  # None: no pod is started, and the root stays unchecked
    probe_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        require(self.namespace != "", "namespace", "must name a namespace", self.namespace)
        require(self.probe_timeout_s > 0, "probe_timeout_s", "must be > 0", self.probe_timeout_s)
