"""Plans of ranks and workers on GPUs, and the clusters that plans are made for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import ConfigError
from slipstream.learner.config import ParallelConfig
from slipstream.workers.placement.config import Layout, PlacementConfig, PlacementMode
from slipstream.workers.placement.plan import (
    Cluster,
    Node,
    Plan,
    Slot,
    make_plan,
    parse_cluster,
    plan_text,
    replanned,
    sizes,
)


def test_two_nodes_colocated() -> None:
    plan = make_plan(_colocated(nodes=2, per_node=2, tensor=2), parse_cluster("3x4"))
    assert [node.name for node in plan.nodes] == ["node0", "node1"]
    assert plan.learner == (Slot(0, 0), Slot(0, 1), Slot(1, 0), Slot(1, 1))
    assert plan.engines == ((Slot(0, 0),), (Slot(0, 1),), (Slot(1, 0),), (Slot(1, 1),))
    assert plan.groups == ((0,), (1,))


def test_split_gives_the_learner_the_first_nodes() -> None:
    plan = make_plan(_split(training=2, generation=1, per_node=2, engine_tensor=2), parse_cluster("3x2"))
    assert plan.learner == (Slot(0, 0), Slot(0, 1), Slot(1, 0), Slot(1, 1))
    assert plan.engines == ((Slot(2, 0), Slot(2, 1)),)
    assert plan.groups == ((0,), (1,), (2,))


def test_an_engine_over_two_nodes_lies_in_one_domain_and_is_reserved_whole() -> None:
    nodes = tuple(Node(name=f"n{i}", num_gpus=2, nvlink_domain=domain) for i, domain in enumerate("aabb"))
    plan = make_plan(_split(training=1, generation=2, per_node=2, engine_tensor=4), nodes)
    # The engine chooses first: its two neighbours must share a domain.
    assert [node.name for node in plan.nodes] == ["n2", "n0", "n1"]
    assert plan.engines == ((Slot(1, 0), Slot(1, 1), Slot(2, 0), Slot(2, 1)),)
    assert plan.groups == ((0,), (1, 2))


@pytest.mark.parametrize("larger", ["tensor", "engine_tensor"])
def test_a_domain_with_an_odd_node_leaves_it_out_for_the_larger_groups_of_learner_and_engines(larger: str) -> None:
    nodes = tuple(Node(name=f"n{i}", num_gpus=1, nvlink_domain=domain) for i, domain in enumerate("aaabb"))
    plan = make_plan(_colocated(nodes=4, per_node=1, **{larger: 2}), nodes)
    assert [node.name for node in plan.nodes] == ["n0", "n1", "n3", "n4"]


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            parse_cluster("1x4"),
            "placement.nodes must find that many nodes with 4 GPUs among 1x4: there are 1, got 2; lower it and the "
            "layout with it, or add nodes",
        ),
        (
            parse_cluster("8x2"),
            "placement.gpus_per_node must be at most the 2 GPUs of the cluster's largest node, got 4; the cluster has "
            "8x2",
        ),
    ],
)
def test_more_than_the_cluster_has_is_refused(refusal: Callable[..., str], cluster: Cluster, message: str) -> None:
    assert refusal(make_plan, layout=_colocated(nodes=2, per_node=4, tensor=4), cluster=cluster) == message


@pytest.mark.parametrize(("domain_nodes", "largest"), [(None, 1), (1, 1), (3, 3)])
def test_tensor_parallel_ranks_across_nvlink_domains_are_refused(
    refusal: Callable[..., str], domain_nodes: int | None, largest: int
) -> None:
    layout = _colocated(nodes=4, per_node=4, tensor=8)
    cluster = parse_cluster("4x4", domain_nodes=domain_nodes)
    assert refusal(make_plan, layout=layout, cluster=cluster) == (
        "learner.parallel.tensor must divide the 4 GPUs that placement.gpus_per_node takes of a node, or keep each of "
        f"its groups in one NVLink domain (the largest here has {largest} such nodes), got 8; lower it to a divisor "
        "of 4, or label the nodes with their domain"
    )
    make_plan(layout, parse_cluster("4x4", domain_nodes=2))  # two domains hold a group each


def test_ranks_that_share_experts_across_nvlink_domains_are_refused(refusal: Callable[..., str]) -> None:
    layout = _colocated(nodes=4, per_node=4, expert=8)
    message = refusal(make_plan, layout=layout, cluster=parse_cluster("4x4"))
    assert message.startswith("learner.parallel.expert must divide the 4 GPUs that placement.gpus_per_node takes of a")
    assert ", got 8; lower it to a divisor of 4" in message
    make_plan(layout, parse_cluster("4x4", domain_nodes=2))  # two domains hold a group each


def test_context_parallel_ranks_across_nvlink_domains_are_refused(refusal: Callable[..., str]) -> None:
    layout = _colocated(nodes=4, per_node=4, tensor=2, context=4)
    message = refusal(make_plan, layout=layout, cluster=parse_cluster("4x4"))
    assert message.startswith("learner.parallel.tensor x context must divide the 4 GPUs that placement.gpus_per_node")
    assert ", got 8; lower it to a divisor of 4" in message
    plan = make_plan(layout, parse_cluster("4x4", domain_nodes=2))
    assert "learner: 16 ranks, TP 2 x PP 1 x CP 4 x DP 2" in plan_text(plan)


def test_an_engine_across_domains_is_refused_by_its_own_field(refusal: Callable[..., str]) -> None:
    layout = _split(training=1, generation=2, per_node=2, engine_tensor=4)
    message = refusal(make_plan, layout=layout, cluster=parse_cluster("3x2"))
    assert message.startswith("engine.tensor_parallel_size must divide the 2 GPUs that placement.gpus_per_node takes")
    assert ", got 4; lower it to a divisor of 2" in message


def test_of_groups_that_share_nodes_the_larger_is_the_one_to_change(refusal: Callable[..., str]) -> None:
    for tensor, engine_tensor, field in ((2, 4, "engine"), (4, 4, "learner"), (8, 4, "learner")):
        layout = _colocated(nodes=8, per_node=1, tensor=tensor, engine_tensor=engine_tensor)
        message = refusal(make_plan, layout=layout, cluster=parse_cluster("8x1"))
        assert message.startswith(
            {"engine": "engine.tensor_parallel_size ", "learner": "learner.parallel.tensor "}[field]
        )


def test_two_neighbours_that_share_experts_are_a_group_too(refusal: Callable[..., str]) -> None:
    message = refusal(make_plan, layout=_colocated(nodes=2, per_node=1, expert=2), cluster=parse_cluster("2x1"))
    assert message.startswith("learner.parallel.expert ") and ", got 2; " in message


def test_a_spare_node_takes_the_place_of_a_lost_one_and_the_others_keep_theirs() -> None:
    plan = make_plan(_split(training=2, generation=1, per_node=2, engine_tensor=2), parse_cluster("3x2"))
    small, spare = Node(name="small", num_gpus=1), Node(name="spare", num_gpus=2)
    after = replanned(plan, (small, spare, plan.nodes[0], plan.nodes[2]))
    assert [node.name for node in after.nodes] == ["node0", "spare", "node2"]
    assert (after.learner, after.engines) == (plan.learner, plan.engines)


def test_without_a_spare_node_a_lost_one_is_missing(refusal: Callable[..., str]) -> None:
    plan = make_plan(_split(training=2, generation=1, per_node=2, engine_tensor=2), parse_cluster("3x2"))
    message = refusal(replanned, plan=plan, cluster=plan.nodes[1:])
    assert message.startswith("placement.nodes must find that many nodes with 2 GPUs among 2x2: there are 2, got 3")


def test_an_engine_over_two_nodes_gets_another_pair_of_one_domain_when_one_is_lost() -> None:
    nodes = tuple(Node(name=f"n{i}", num_gpus=2, nvlink_domain=domain) for i, domain in enumerate("aabbcc"))
    plan = make_plan(_split(training=1, generation=2, per_node=2, engine_tensor=4), nodes[:4])
    assert [node.name for node in plan.nodes] == ["n2", "n0", "n1"]
    after = replanned(plan, (*nodes[:1], *nodes[2:]))
    assert [node.name for node in after.nodes] == ["n0", "n2", "n3"]


def test_a_cluster_without_nodes_has_no_gpus(refusal: Callable[..., str]) -> None:
    message = refusal(make_plan, layout=_colocated(nodes=1, per_node=4, tensor=4), cluster=())
    assert message == (
        "placement.gpus_per_node must be at most the 0 GPUs of the cluster's largest node, got 4; the cluster has no "
        "nodes"
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Roles that fill their nodes, groups of neighbours up to five nodes large."""
    per_node = draw(st.integers(1, 4))
    is_split = draw(st.booleans())
    training, generation = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    nodes = training + generation if is_split else training
    learner_gpus = training * per_node
    engine_gpus = (generation if is_split else training) * per_node
    tensor = draw(st.sampled_from(_divisors(learner_gpus)))
    context = draw(st.sampled_from(_divisors(learner_gpus // tensor)))
    pipeline = draw(st.sampled_from(_divisors(learner_gpus // tensor // context)))
    data = learner_gpus // tensor // context // pipeline
    engine_tensor = draw(st.sampled_from(_divisors(engine_gpus)))
    return Layout(
        placement=PlacementConfig(
            nodes=nodes,
            gpus_per_node=per_node,
            mode=PlacementMode.SPLIT if is_split else PlacementMode.COLOCATED,
            generation_nodes=generation if is_split else 0,
            training_nodes=training if is_split else 0,
        ),
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline, context=context, data=data),
        engine_tensor=engine_tensor,
        num_engines=engine_gpus // engine_tensor,
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Nodes of different sizes, some with a domain."""
    domains = st.none() | st.sampled_from("ab")
    drawn = draw(st.lists(st.tuples(st.integers(0, 5), domains), min_size=1, max_size=14))
    return [Node(name=str(i), num_gpus=gpus, nvlink_domain=domain) for i, (gpus, domain) in enumerate(drawn)]


@given(layouts(), clusters())
def test_a_plan_uses_every_gpu_as_said_and_none_twice_by_one_role(layout: Layout, cluster: Cluster) -> None:
    plan = _plan_or_none(layout, cluster)
    if plan is None:
        return
    placement, per_node = layout.placement, layout.placement.gpus_per_node
    assert len(set(plan.nodes)) == placement.nodes
    assert all(node in cluster and node.num_gpus >= per_node for node in plan.nodes)
    workers = [slot for engine in plan.engines for slot in engine]
    for slots in (plan.learner, workers):
        assert len(set(slots)) == len(slots)
        assert list(slots) == sorted(slots)  # order is (node, GPU)
    if placement.mode is PlacementMode.COLOCATED:
        assert list(plan.learner) == workers == list(plan.slots)
    else:
        assert {slot.node for slot in plan.learner}.isdisjoint(slot.node for slot in workers)
        assert {*plan.learner, *workers} == set(plan.slots)
        assert len({slot.node for slot in plan.learner}) == placement.training_nodes
    assert [len(engine) for engine in plan.engines] == [layout.engine_tensor] * layout.num_engines
    assert sorted(index for group in plan.groups for index in group) == list(range(placement.nodes))


@given(layouts(), clusters())
def test_groups_of_neighbours_lie_in_one_node_or_one_domain(layout: Layout, cluster: Cluster) -> None:
    plan = _plan_or_none(layout, cluster)
    if plan is None:
        return
    size = layout.parallel.num_neighbours
    learner = [plan.learner[start : start + size] for start in range(0, len(plan.learner), size)]
    for group in (*learner, *plan.engines):
        nodes = {slot.node for slot in group}
        domains = {plan.nodes[node].nvlink_domain for node in nodes}
        assert len(nodes) == 1 or (len(domains) == 1 and None not in domains)
    for engine in plan.engines:
        assert any({slot.node for slot in engine} <= set(group) for group in plan.groups)


@given(layouts(), clusters(), st.data())
def test_after_a_loss_a_plan_is_as_good_as_a_new_one_and_moves_nobody_without_need(
    layout: Layout, cluster: Cluster, data: st.DataObject
) -> None:
    plan = _plan_or_none(layout, cluster)
    if plan is None:
        return
    lost = data.draw(st.sets(st.sampled_from(plan.nodes)))
    rest = [node for node in cluster if node not in lost]
    new = _plan_or_none(layout, rest)
    if new is None:
        with pytest.raises(ConfigError):
            replanned(plan, rest)
        return
    after = replanned(plan, rest)
    assert len(set(after.nodes)) == layout.placement.nodes
    assert set(after.nodes) <= {node for node in rest if node.num_gpus >= layout.placement.gpus_per_node}
    if layout.learner_unit == layout.engine_unit == 1:
        assert all(now == then for now, then in zip(after.nodes, plan.nodes, strict=True) if then not in lost)
    else:
        assert after == new


@given(layouts())
def test_a_cluster_of_one_domain_always_takes_a_layout(layout: Layout) -> None:
    placement = layout.placement
    cluster = parse_cluster(f"{placement.nodes}x{placement.gpus_per_node}", domain_nodes=placement.nodes)
    plan = make_plan(layout, cluster)
    assert len(plan.learner) == layout.parallel.world_size
    assert len(plan.engines) == layout.num_engines


def _plan_or_none(layout: Layout, cluster: Cluster) -> Plan | None:
    try:
        return make_plan(layout, cluster)
    except ConfigError:
        return None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _colocated(
    *, nodes: int, per_node: int, tensor: int = 1, engine_tensor: int = 1, expert: int = 1, context: int = 1
) -> Layout:
    gpus = nodes * per_node
    return Layout(
        placement=PlacementConfig(nodes=nodes, gpus_per_node=per_node),
        parallel=ParallelConfig(tensor=tensor, context=context, data=gpus // tensor // context, expert=expert),
        engine_tensor=engine_tensor,
        num_engines=gpus // engine_tensor,
    )


def _split(*, training: int, generation: int, per_node: int, engine_tensor: int) -> Layout:
    return Layout(
        placement=PlacementConfig(
            nodes=training + generation,
            gpus_per_node=per_node,
            mode=PlacementMode.SPLIT,
            generation_nodes=generation,
            training_nodes=training,
        ),
        parallel=ParallelConfig(data=training * per_node),
        engine_tensor=engine_tensor,
        num_engines=generation * per_node // engine_tensor,
    )


def test_a_cluster_is_nodes_by_gpus() -> None:
    cluster = parse_cluster("12x4", domain_nodes=9)
    assert [node.name for node in cluster[:2]] == ["node00", "node01"]  # names sort as numbers do
    assert [node.nvlink_domain for node in cluster] == ["domain0"] * 9 + ["domain1"] * 3
    assert {node.num_gpus for node in cluster} == {4}
    assert {node.nvlink_domain for node in parse_cluster("1x1")} == {None}


def test_a_cluster_says_how_many_nodes_have_how_many_gpus() -> None:
    nodes = tuple(Node(name=str(i), num_gpus=gpus) for i, gpus in enumerate([4, 0, 4, 8]))
    assert sizes(nodes) == "1x8, 2x4, 1x0"
    assert sizes(()) == "no nodes"


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
