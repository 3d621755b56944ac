"""Settings that all launch plans of a cluster share."""

from __future__ import annotations

from typing import Any

from flytekit.models.common import RawOutputDataConfig
from flytekit.models.security import Identity, SecurityContext

from tasks.resources import CLUSTER


def on_cluster(account: str | None = CLUSTER.service_account) -> dict[str, Any]:
    """Return the service account of the pods and the prefix of Flyte's outputs, as arguments of a launch plan."""
    settings: dict[str, Any] = {}
    if account is not None and not CLUSTER.is_local:
        settings["security_context"] = SecurityContext(run_as=Identity(k8s_service_account=account))
    if CLUSTER.object_store is not None:
        settings["raw_output_data_config"] = RawOutputDataConfig(CLUSTER.object_store.prefix)
    return settings
