"""A cluster in a few characters."""

from collections.abc import Callable

import pytest

from slipstream.workers.placement.plan import Cluster, Node, parse_cluster


def test_a_cluster_is_nodes_by_gpus() -> None:
    cluster = parse_cluster("12x4", domain_nodes=9)
    assert [node.name for node in cluster.nodes[:2]] == ["node00", "node01"]  # names sort as numbers do
    assert [node.nvlink_domain for node in cluster.nodes] == ["domain0"] * 9 + ["domain1"] * 3
    assert {node.num_gpus for node in cluster.nodes} == {4}
    assert {node.nvlink_domain for node in parse_cluster("1x1").nodes} == {None}


def test_a_cluster_says_how_many_nodes_have_how_many_gpus() -> None:
    nodes = tuple(Node(name=str(i), num_gpus=gpus) for i, gpus in enumerate([4, 0, 4, 8]))
    assert str(Cluster(nodes=nodes)) == "1x8, 2x4, 1x0"
    assert str(Cluster(nodes=())) == "no nodes"


@pytest.mark.parametrize("text", ["8", "x4", "8x", "8x4x2", "-1x4", "8 x 4"])
def test_another_form_is_refused(refusal: Callable[..., str], text: str) -> None:
    assert refusal(parse_cluster, text=text) == (
        f"--cluster must read NODESxGPUS, got {text!r}; as in 8x4: 8 nodes of 4 GPUs"
    )


def test_no_nodes_no_gpus_and_empty_domains_are_refused(refusal: Callable[..., str]) -> None:
    assert refusal(parse_cluster, text="0x4") == "--cluster must have nodes and GPUs, got '0x4'"
    assert refusal(parse_cluster, text="4x0") == "--cluster must have nodes and GPUs, got '4x0'"
    assert refusal(parse_cluster, text="4x4", domain_nodes=0) == "--domain-nodes must be >= 1, got 0"


def test_a_numa_label_names_every_gpu(refusal: Callable[..., str]) -> None:
    assert Node(name="n", num_gpus=2, numa=(0, 1)).numa == (0, 1)
    message = refusal(Node, name="n", num_gpus=2, numa=(0,))
    assert message == "node n: numa must name 2 GPUs, got (0,)"
