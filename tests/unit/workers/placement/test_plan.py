"""Plans of ranks and workers on GPUs, the clusters that plans are made for, and their table for users."""

from collections.abc import Callable
from typing import Any

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

Refusal = Callable[..., str]


def _colocated(nodes: int, per_node: int, *, engine_tensor: int = 1, **parallel: Any) -> Layout:
    """A learner that fills the GPUs with data-parallel copies of what `parallel` says, and as many engines as fit."""
    gpus = nodes * per_node
    copies = gpus // parallel.get("tensor", 1) // parallel.get("context", 1)
    return Layout(
        placement=PlacementConfig(nodes=nodes, gpus_per_node=per_node),
        parallel=ParallelConfig(data=copies, **parallel),
        engine_tensor=engine_tensor,
        num_engines=gpus // engine_tensor,
    )


def _split(training: int, generation: int, *, engine_tensor: int, **parallel: Any) -> Layout:
    """Nodes of two GPUs."""
    nodes: dict[str, Any] = {"nodes": training + generation, "generation_nodes": generation, "training_nodes": training}
    return Layout(
        placement=PlacementConfig(mode=PlacementMode.SPLIT, gpus_per_node=2, **nodes),
        parallel=ParallelConfig(data=2 * training // parallel.get("tensor", 1), **parallel),
        engine_tensor=engine_tensor,
        num_engines=generation * 2 // engine_tensor,
    )


def _in_domains(domains: str, num_gpus: int) -> tuple[Node, ...]:
    return tuple(Node(name=f"n{i}", num_gpus=num_gpus, nvlink_domain=domain) for i, domain in enumerate(domains))


def _slots(*nodes: int) -> tuple[Slot, ...]:
    """Both GPUs of these nodes."""
    return tuple(Slot(node, gpu) for node in nodes for gpu in (0, 1))


def test_colocated_roles_share_all_gpus_and_split_gives_the_learner_the_first_nodes() -> None:
    plan = make_plan(_colocated(2, 2, tensor=2), parse_cluster("3x4"))
    assert [node.name for node in plan.nodes] == ["node0", "node1"]
    assert (plan.learner, plan.engines) == (_slots(0, 1), tuple((slot,) for slot in _slots(0, 1)))
    assert plan.groups == ((0,), (1,))
    plan = make_plan(_split(2, 1, engine_tensor=2), parse_cluster("3x2"))
    assert (plan.learner, plan.engines) == (_slots(0, 1), (_slots(2),))
    assert plan.groups == ((0,), (1,), (2,))


def test_an_engine_over_two_nodes_lies_in_one_domain_is_reserved_whole_and_moves_whole_when_a_node_is_lost() -> None:
    nodes = _in_domains("aabbcc", 2)
    plan = make_plan(_split(1, 2, engine_tensor=4), nodes[:4])
    # The engine chooses first: its two neighbours must share a domain.
    assert [node.name for node in plan.nodes] == ["n2", "n0", "n1"]
    assert plan.engines == (_slots(1, 2),)
    assert plan.groups == ((0,), (1, 2))
    after = replanned(plan, (*nodes[:1], *nodes[2:]))
    assert [node.name for node in after.nodes] == ["n0", "n2", "n3"]


@pytest.mark.parametrize("larger", ["tensor", "engine_tensor"])
def test_a_domain_with_an_odd_node_leaves_it_out_for_the_larger_groups_of_learner_and_engines(larger: str) -> None:
    plan = make_plan(_colocated(4, 1, **{larger: 2}), _in_domains("aaabb", 1))
    assert [node.name for node in plan.nodes] == ["n0", "n1", "n3", "n4"]


LARGEST = "placement.gpus_per_node must be at most the {} GPUs of the cluster's largest node, got 4; the cluster has {}"


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            parse_cluster("1x4"),
            "placement.nodes must find that many nodes with 4 GPUs among 1x4: there are 1, got 2; lower it and the "
            "layout with it, or add nodes",
        ),
        (parse_cluster("8x2"), LARGEST.format(2, "8x2")),
        ((), LARGEST.format(0, "no nodes")),
    ],
)
def test_more_than_the_cluster_has_is_refused(refusal: Refusal, cluster: Cluster, message: str) -> None:
    assert refusal(make_plan, layout=_colocated(2, 4, tensor=4), cluster=cluster) == message


@pytest.mark.parametrize(
    ("layout", "cluster", "field", "divides"),
    [
        *((_colocated(4, 4, tensor=8), ("4x4", nodes), "learner.parallel.tensor", (4, 8)) for nodes in (None, 1, 3)),
        (_colocated(4, 4, expert=8), ("4x4", None), "learner.parallel.expert", (4, 8)),
        (_colocated(4, 4, tensor=2, context=4), ("4x4", None), "learner.parallel.tensor x context", (4, 8)),
        (_colocated(2, 1, expert=2), ("2x1", None), "learner.parallel.expert", (1, 2)),
        (_split(1, 2, engine_tensor=4), ("3x2", None), "engine.tensor_parallel_size", (2, 4)),
        # Of groups that share nodes the larger is the one to change.
        (_colocated(8, 1, tensor=2, engine_tensor=4), ("8x1", None), "engine.tensor_parallel_size", (1, 4)),
        (_colocated(8, 1, tensor=4, engine_tensor=4), ("8x1", None), "learner.parallel.tensor", (1, 4)),
        (_colocated(8, 1, tensor=8, engine_tensor=4), ("8x1", None), "learner.parallel.tensor", (1, 8)),
    ],
)
def test_a_group_across_nvlink_domains_is_refused_by_its_own_field(
    refusal: Refusal, layout: Layout, cluster: tuple[str, int | None], field: str, divides: tuple[int, int]
) -> None:
    (text, domain_nodes), (per_node, size) = cluster, divides
    assert refusal(make_plan, layout=layout, cluster=parse_cluster(text, domain_nodes=domain_nodes)) == (
        f"{field} must divide the {per_node} GPUs that placement.gpus_per_node takes of a node, or keep each of its "
        f"groups in one NVLink domain (the largest here has {domain_nodes or 1} such nodes), got {size}; lower it to a "
        f"divisor of {per_node}, or label the nodes with their domain"
    )
    if text == "4x4":
        make_plan(layout, parse_cluster(text, domain_nodes=2))  # two domains hold a group each


def test_a_spare_node_takes_the_place_of_a_lost_one_and_without_one_it_is_missing(refusal: Refusal) -> None:
    plan = make_plan(_split(2, 1, engine_tensor=2), parse_cluster("3x2"))
    small, spare = Node(name="small", num_gpus=1), Node(name="spare", num_gpus=2)
    after = replanned(plan, (small, spare, plan.nodes[0], plan.nodes[2]))
    assert [node.name for node in after.nodes] == ["node0", "spare", "node2"]
    assert (after.learner, after.engines) == (plan.learner, plan.engines)
    message = refusal(replanned, plan=plan, cluster=plan.nodes[1:])
    assert message.startswith("placement.nodes must find that many nodes with 2 GPUs among 2x2: there are 2, got 3")


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
    split = {"generation_nodes": generation, "training_nodes": training, "mode": PlacementMode.SPLIT}
    return Layout(
        placement=PlacementConfig(nodes=nodes, gpus_per_node=per_node, **(split if is_split else {})),
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
def test_a_plan_uses_every_gpu_once_a_role_and_keeps_neighbours_in_a_node_or_a_domain(
    layout: Layout, cluster: Cluster
) -> None:
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


def test_a_cluster_is_nodes_by_gpus() -> None:
    cluster = parse_cluster("12x4", domain_nodes=9)
    assert [node.name for node in cluster[:2]] == ["node00", "node01"]  # names sort as numbers do
    assert [node.nvlink_domain for node in cluster] == ["domain0"] * 9 + ["domain1"] * 3
    assert {node.num_gpus for node in cluster} == {4}
    assert {node.nvlink_domain for node in parse_cluster("1x1")} == {None}


def test_a_cluster_says_how_many_nodes_have_how_many_gpus() -> None:
    nodes = tuple(Node(name=str(i), num_gpus=gpus) for i, gpus in enumerate([4, 0, 4, 8]))
    assert (sizes(nodes), sizes(())) == ("1x8, 2x4, 1x0", "no nodes")


@pytest.mark.parametrize("text", ["8", "x4", "8x", "8x4x2", "-1x4", "8 x 4"])
def test_another_form_of_a_cluster_is_refused(refusal: Refusal, text: str) -> None:
    said = f"--cluster must read NODESxGPUS, got {text!r}; as in 8x4: 8 nodes of 4 GPUs"
    assert refusal(parse_cluster, text=text) == said


def test_no_nodes_no_gpus_and_empty_domains_are_refused(refusal: Refusal) -> None:
    for text in ("0x4", "4x0"):
        assert refusal(parse_cluster, text=text) == f"--cluster must have nodes and GPUs, got {text!r}"
    assert refusal(parse_cluster, text="4x4", domain_nodes=0) == "--domain-nodes must be >= 1, got 0"


def test_a_split_plan_shows_ranks_and_workers() -> None:
    layout = _split(2, 1, engine_tensor=2, tensor=2, sequence_parallel=True)
    nodes = tuple(Node(name=f"n{i}", num_gpus=2, nvlink_domain="rack", numa=(0, 1)) for i in range(3))
    assert plan_text(make_plan(layout, nodes)).splitlines() == [
        "3 x 2 GPUs, split",
        "learner: 4 ranks, TP 2 with SP x PP 1 x DP 2",
        "engines: 1 of TP 2, executor mp (processes of one node)",
        "",
        "node  NVLink domain  GPU 0          GPU 1",
        "----  -------------  -------------  -------------",
        "n0    rack           L0 (NUMA 0)    L1 (NUMA 1)",
        "n1    rack           L2 (NUMA 0)    L3 (NUMA 1)",
        "n2    rack           E0.0 (NUMA 0)  E0.1 (NUMA 1)",
    ]


LOGICAL = Layout(placement=PlacementConfig(gpus_per_node=1, logical_gpus=True))


@pytest.mark.parametrize(
    ("layout", "domain_nodes", "shown"),
    [
        (
            _colocated(2, 1, engine_tensor=2),
            2,
            """
            engines: 1 of TP 2, executor ray (over several nodes)
            node0  domain0        L0 E0.0
            node1  domain0        L1 E0.1
            """,
        ),
        (  # without sequence parallelism; an engine of one GPU has no worker's number
            _colocated(1, 2, tensor=2),
            None,
            """
            learner: 2 ranks, TP 2 x PP 1 x DP 1
            engines: 2 of TP 1, executor uni (in one process)
            node0  -              L0 E0  L1 E1
            """,
        ),
        (_colocated(4, 4, tensor=2, context=4), 2, "learner: 16 ranks, TP 2 x PP 1 x CP 4 x DP 2"),
        (LOGICAL, None, "1 x 1 logical GPUs (processes may compute on CPUs), colocated"),
    ],
)
def test_a_colocated_plan_shows_both_on_a_gpu_and_how(layout: Layout, domain_nodes: int | None, shown: str) -> None:
    placement = layout.placement
    cluster = parse_cluster(f"{placement.nodes}x{placement.gpus_per_node}", domain_nodes=domain_nodes)
    lines = plan_text(make_plan(layout, cluster)).splitlines()
    assert {line.strip() for line in shown.strip().splitlines()} <= {*lines}
