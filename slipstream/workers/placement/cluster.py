"""What a plan is made for: the nodes of a cluster, as Ray reports them or as a user writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipstream.config import require


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One host. Labels are None or empty where nobody gave them."""

    name: str  # its address, where it has one
    num_gpus: int
    nvlink_domain: str | None = None  # nodes of one domain reach each other's GPUs over NVLink
    numa: tuple[int, ...] = ()  # NUMA node of each GPU

    def __post_init__(self) -> None:
        known = len(self.numa)
        require(known in (0, self.num_gpus), f"node {self.name}: numa", f"must name {self.num_gpus} GPUs", self.numa)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts that run now, or that are meant to."""

    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        """How many nodes have how many GPUs, as in `8x4, 1x0`."""
        counts = [node.num_gpus for node in self.nodes]
        return ", ".join(f"{counts.count(gpus)}x{gpus}" for gpus in sorted(set(counts), reverse=True)) or "no nodes"


def parse_cluster(text: str, *, domain_nodes: int | None = None) -> Cluster:
    """The cluster that `8x4` (8 nodes of 4 GPUs) describes.

    Args:
        domain_nodes: so many neighbouring nodes are one NVLink domain; None: no label says so.
    Raises:
        ConfigError: another form, or no GPUs.
    """
    match = re.fullmatch(r"(\d{1,5})x(\d{1,3})", text, re.ASCII)
    require(match is not None, "--cluster", "must read NODESxGPUS", text, "as in 8x4: 8 nodes of 4 GPUs")
    assert match is not None
    num_nodes, num_gpus = int(match[1]), int(match[2])
    require(num_nodes > 0 and num_gpus > 0, "--cluster", "must have nodes and GPUs", text)
    require(domain_nodes is None or domain_nodes > 0, "--domain-nodes", "must be >= 1", domain_nodes)
    width = len(str(num_nodes - 1))
    return Cluster(
        nodes=tuple(
            Node(
                name=f"node{index:0{width}d}",
                num_gpus=num_gpus,
                nvlink_domain=None if domain_nodes is None else f"domain{index // domain_nodes}",
            )
            for index in range(num_nodes)
        )
    )
