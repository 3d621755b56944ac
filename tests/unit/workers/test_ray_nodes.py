"""What Ray says of its nodes, as the planner sees it."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.workers.placement.plan import Node
from slipstream.workers.ray_nodes import NUMA_LABEL, NVLINK_LABEL, RayNode, as_cluster


def _node(labels: dict[str, str]) -> RayNode:
    return RayNode(
        id="n",
        address="10.0.0.1",
        num_cpus=8,
        num_gpus=2,
        free_cpus=8,
        free_gpus=2,
        object_store_bytes=1,
        labels=labels,
    )


def test_labels_say_the_nvlink_domain_and_the_numa_node_of_each_gpu() -> None:
    labels = {NVLINK_LABEL: "rack7", NUMA_LABEL: "0-1", "ray.io/node-id": "n"}
    assert as_cluster([_node(labels)]).nodes == (Node(name="n", num_gpus=2, nvlink_domain="rack7", numa=(0, 1)),)
    assert as_cluster([_node({})]).nodes == (Node(name="n", num_gpus=2),)


def test_a_numa_label_that_names_other_gpus_is_refused(refusal: Callable[..., str]) -> None:
    for text in ("0", "0-x", "0-1-1"):
        assert refusal(as_cluster, nodes=[_node({NUMA_LABEL: text})]) == (
            f"label slipstream.io/numa of node 10.0.0.1 must name the NUMA node of each of its 2 GPUs, got {text!r}; "
            "as in 0-0-1-1"
        )
