"""Refusals of a launch within seconds: a root that pods do not share, a recipe that the cluster cannot hold."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from slipstream.config import require
from slipstream.kubernetes.profile import ClusterProfile


def shared_root(run_root: str, profile: ClusterProfile, *, is_local: bool) -> Path:
    """`run_root` as a directory that every task of the execution sees.

    Args:
        is_local: all tasks run in this process, as `slipstream demo` runs them.
    Raises:
        ConfigError: a URI, which would become a folder of that name on the pod's own disk; in pods, a relative path
            or one outside the shared volume, which would end with the pod.
    """
    require("://" not in run_root, "run_root", "must be a path, not a URI", run_root, f"as in {profile.run_root}")
    if is_local:
        return Path(run_root)
    path = PurePosixPath(run_root)
    require(path.is_absolute(), "run_root", "must be absolute in pods", run_root, f"as in {profile.run_root}")
    if profile.storage is not None:
        mount = profile.storage.mount_path
        rule = f"must lie below {mount}, the shared volume of cluster {profile.name}"
        inside = path.is_relative_to(mount) and ".." not in path.parts
        require(inside, "run_root", rule, run_root, f"as in {profile.run_root}")
    return Path(run_root)


def require_fits(profile: ClusterProfile, *, nodes: int, gpus_per_node: int, trains_from_scratch: bool) -> None:
    """Refuse a recipe whose placement the cluster's nodes cannot hold.

    Raises:
        ConfigError: with the field of the recipe.
    """
    where = f"cluster {profile.name}"
    if profile.gpu is None:
        fix = "register for a cluster with GPUs, as in make register CLUSTER=gb200"
        require(gpus_per_node == 0, "placement.gpus_per_node", f"must be 0 on {where}", gpus_per_node, fix)
        return
    offered = profile.gpu
    require(
        1 <= gpus_per_node <= offered.gpus_per_node,
        "placement.gpus_per_node",
        f"must be 1 to {offered.gpus_per_node} on {where}",
        gpus_per_node,
        "register for a cluster without GPUs, as in make register CLUSTER=cpu" if gpus_per_node == 0 else "",
    )
    rule = f"must be <= {offered.nodes}, the nodes of {where}"
    require(nodes <= offered.nodes, "placement.nodes", rule, nodes, "override it with learner.parallel and num_engines")
    rule = f"must name a model on {where}, where prepare_policy has no GPU"
    require(not trains_from_scratch, "policy.model", rule, "scratch")
