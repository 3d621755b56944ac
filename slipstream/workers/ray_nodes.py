"""The nodes of the Ray cluster: what each has in all, what is free of it, and its labels."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # the public API sums over all nodes

from slipstream.config import require
from slipstream.workers.placement.plan import Cluster, Node

NVLINK_LABEL = "ray.io/gpu-domain"
"""Ray's own label of nodes that share an NVLink domain: its topology strategies read it too."""

NUMA_LABEL = "slipstream.io/numa"
"""NUMA node of each GPU in their order, as in `0-0-1-1`; given with `ray start --labels`."""

_TYPE_LABEL = "ray.io/accelerator-type"  # set by Ray on nodes with accelerators
_GPU, _CPU, _STORE = "GPU", "CPU", "object_store_memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNode:
    """One live node."""

    id: str
    address: str
    num_cpus: float
    num_gpus: int
    free_cpus: float
    free_gpus: float
    object_store_bytes: int
    labels: Mapping[str, str]


def ray_nodes() -> list[RayNode]:
    """The live nodes, by address."""
    free = available_resources_per_node()
    nodes = [_node(values, free.get(values["NodeID"], {})) for values in ray.nodes() if values["Alive"]]
    return sorted(nodes, key=lambda node: (_numeric(node.address), node.id))


def accelerators() -> str:
    """The types of the cluster's accelerators as Ray calls them, as in `H200`; empty without any."""
    return " ".join(sorted({node.labels[_TYPE_LABEL] for node in ray_nodes() if _TYPE_LABEL in node.labels}))


def as_cluster(nodes: Sequence[RayNode]) -> Cluster:
    """What the planner sees of them; a node's name is its id.

    Raises:
        ConfigError: the NUMA label of a node does not name each of its GPUs.
    """
    return Cluster(
        nodes=tuple(
            Node(
                name=node.id,
                num_gpus=node.num_gpus,
                nvlink_domain=node.labels.get(NVLINK_LABEL),
                numa=_numa(node),
            )
            for node in nodes
        )
    )


def _node(values: Mapping[str, Any], free: Mapping[str, float]) -> RayNode:
    resources = values["Resources"]
    return RayNode(
        id=values["NodeID"],
        address=values["NodeManagerAddress"],
        num_cpus=resources.get(_CPU, 0.0),
        num_gpus=int(resources.get(_GPU, 0)),
        free_cpus=free.get(_CPU, 0.0),
        free_gpus=free.get(_GPU, 0.0),
        object_store_bytes=int(resources.get(_STORE, 0)),
        labels=dict(values["Labels"]),
    )


def _numa(node: RayNode) -> tuple[int, ...]:
    text = node.labels.get(NUMA_LABEL)
    if text is None:
        return ()
    parts = text.split("-")
    rule = f"of node {node.address} must name the NUMA node of each of its {node.num_gpus} GPUs"
    is_whole = len(parts) == node.num_gpus and all(part.isdigit() for part in parts)
    require(is_whole, f"label {NUMA_LABEL}", rule, text, "as in 0-0-1-1")
    return tuple(map(int, parts))


def _numeric(address: str) -> tuple[int, str]:
    """10.0.0.9 comes before 10.0.0.11; names that are no address come last."""
    try:
        return int(ipaddress.ip_address(address)), ""
    except ValueError:
        return 1 << 128, address
