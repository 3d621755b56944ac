"""Placement of learner ranks and engine workers on GPUs: a pure function of layout and cluster.

GPUs are ordered by node, then by number. Ranks follow Megatron's order (`parallel_state.initialize_model_parallel`,
"tp-cp-ep-dp-pp"): tensor-parallel or expert-parallel ranks are neighbours, then data-parallel ranks, then pipeline
stages. Worker j of engine e is number e * tensor_parallel_size + j.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.config import require
from slipstream.workers.placement.config import Layout, PlacementMode

_ENGINE_FIELD = "engine.tensor_parallel_size"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One host of a cluster; labels that are not set are None or empty. A live host has the fields below `numa` too."""

    name: str  # Ray's id of a live host
    num_gpus: int
    nvlink_domain: str | None = None  # nodes of one domain reach each other's GPUs over NVLink
    numa: tuple[int, ...] = ()  # NUMA node of each GPU, by `session.with_numa`
    address: str = ""
    num_cpus: float = 0.0
    free_cpus: float = field(default=0.0, compare=False)
    free_gpus: float = field(default=0.0, compare=False)
    object_store_bytes: int = field(default=0, compare=False)
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)


Cluster = Sequence[Node]
"""Hosts of a running or a planned cluster."""


def sizes(cluster: Cluster) -> str:
    """Count nodes by number of GPUs, as in `8x4, 1x0`."""
    counts = [node.num_gpus for node in cluster]
    return ", ".join(f"{counts.count(gpus)}x{gpus}" for gpus in sorted(set(counts), reverse=True)) or "no nodes"


def parse_cluster(text: str, *, domain_nodes: int | None = None) -> list[Node]:
    """Parse a cluster such as `8x4`: 8 nodes of 4 GPUs; every `domain_nodes` neighbours form an NVLink domain."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,3})", text, re.ASCII)
    require(match is not None, "--cluster", "must read NODESxGPUS", text, "as in 8x4: 8 nodes of 4 GPUs")
    assert match is not None
    num_nodes, num_gpus = int(match[1]), int(match[2])
    require(num_nodes > 0 and num_gpus > 0, "--cluster", "must have nodes and GPUs", text)
    require(domain_nodes is None or domain_nodes > 0, "--domain-nodes", "must be >= 1", domain_nodes)
    width = len(str(num_nodes - 1))
    domains = [None if domain_nodes is None else f"domain{index // domain_nodes}" for index in range(num_nodes)]
    return [
        Node(name=f"node{index:0{width}d}", num_gpus=num_gpus, nvlink_domain=domain)
        for index, domain in enumerate(domains)
    ]


class Slot(NamedTuple):
    """A GPU by the index of its node in the plan and its own index on that node."""

    node: int
    gpu: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Placement of every rank and worker."""

    layout: Layout
    nodes: tuple[Node, ...]  # of the run, in order
    learner: tuple[Slot, ...]  # by rank
    engines: tuple[tuple[Slot, ...], ...]  # by engine and worker

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All GPUs of the run, in order."""
        per_node = self.layout.placement.gpus_per_node
        return tuple(Slot(node, gpu) for node in range(len(self.nodes)) for gpu in range(per_node))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Node indices in groups that are reserved together, because the workers of an engine span the nodes."""
        unit = self.layout.engine_unit
        first = self.engines[0][0].node
        alone = [(node,) for node in range(len(self.nodes)) if node < first]
        rest = range(first, len(self.nodes))
        return (*alone, *(tuple(rest[start : start + unit]) for start in range(0, len(rest), unit)))


def make_plan(layout: Layout, cluster: Cluster) -> Plan:
    """Place `layout` on `cluster`; with mode `split` the learner's nodes come first.

    Raises:
        ConfigError: the cluster has too few nodes or GPUs, or a group would leave its NVLink domain.
    """
    assert layout.has_gpus, "without GPUs there is nothing to plan"
    placement, per_node = layout.placement, layout.placement.gpus_per_node
    fitting = [node for node in cluster if node.num_gpus >= per_node]
    most = max((node.num_gpus for node in cluster), default=0)
    rule = f"must be at most the {most} GPUs of the cluster's largest node"
    require(bool(fitting), "placement.gpus_per_node", rule, per_node, f"the cluster has {sizes(cluster)}")
    rule = f"must find that many nodes with {per_node} GPUs among {sizes(cluster)}: there are {len(fitting)}"
    fix = "lower it and the layout with it, or add nodes"
    require(len(fitting) >= placement.nodes, "placement.nodes", rule, placement.nodes, fix)
    nodes = _chosen_nodes(fitting, layout)
    slots = [Slot(node, gpu) for node in range(len(nodes)) for gpu in range(per_node)]
    workers = slots[placement.training_nodes * per_node :]  # 0 training nodes if colocated
    size = layout.engine_tensor
    return Plan(
        layout=layout,
        nodes=tuple(nodes),
        learner=tuple(slots[: placement.num_learner_nodes * per_node]),
        engines=tuple(tuple(workers[start : start + size]) for start in range(0, len(workers), size)),
    )


def replanned(plan: Plan, cluster: Cluster) -> Plan:
    """Replace the nodes of `plan` that the cluster has lost; ranks and workers on other nodes keep their places.

    Groups that span nodes are planned anew, as a replacement would have to lie in the same NVLink domain. Errors are
    those of `make_plan`.
    """
    layout, per_node = plan.layout, plan.layout.placement.gpus_per_node
    alive, taken = {node.name for node in cluster}, {node.name for node in plan.nodes}
    spare = [node for node in cluster if node.name not in taken and node.num_gpus >= per_node]
    if len(taken - alive) > len(spare) or max(layout.learner_unit, layout.engine_unit) > 1:
        return make_plan(layout, cluster)
    substitutes = iter(spare)
    return replace(plan, nodes=tuple(node if node.name in alive else next(substitutes) for node in plan.nodes))


def _chosen_nodes(nodes: Sequence[Node], layout: Layout) -> list[Node]:
    """Choose the learner's nodes, then the engines'; of a split, the role with larger groups of neighbours is first."""
    placement, learner, engine = layout.placement, layout.learner_unit, layout.engine_unit
    learner_field = _learner_field(layout)
    if placement.mode is PlacementMode.COLOCATED:
        field = learner_field if learner >= engine else _ENGINE_FIELD
        return _take(nodes, placement.nodes, layout, math.lcm(learner, engine), field)
    wanted = [(learner, placement.training_nodes, learner_field), (engine, placement.generation_nodes, _ENGINE_FIELD)]
    taken: dict[str, list[Node]] = {}
    for unit, count, field in sorted(wanted, reverse=True):
        taken[field] = _take(nodes, count, layout, unit, field)
        nodes = [node for node in nodes if node not in taken[field]]
    return [*taken[learner_field], *taken[_ENGINE_FIELD]]


def _learner_field(layout: Layout) -> str:
    """Recipe field that decides the number of neighbours in a group of the learner."""
    if layout.parallel.expert > 1:
        return "learner.parallel.expert"
    return "learner.parallel.tensor x context" if layout.parallel.context > 1 else "learner.parallel.tensor"


def _take(nodes: Sequence[Node], count: int, layout: Layout, unit: int, field: str) -> list[Node]:
    """Take `count` nodes in runs of `unit` neighbours, each in one NVLink domain; `field` decides the unit."""
    if unit == 1:
        return list(nodes[:count])
    by_domain: dict[str, list[Node]] = {}
    for node in nodes:
        if node.nvlink_domain is not None:
            by_domain.setdefault(node.nvlink_domain, []).append(node)
    whole = [node for domain in by_domain.values() for node in domain[: len(domain) // unit * unit]]
    largest = max(map(len, by_domain.values()), default=1)
    needed = layout.placement.gpus_per_node
    rule = f"must divide the {needed} GPUs that placement.gpus_per_node takes of a node, or keep each of its groups in "
    rule += f"one NVLink domain (the largest here has {largest} such nodes)"
    value = layout.engine_tensor if field == _ENGINE_FIELD else layout.parallel.num_neighbours
    fix = f"lower it to a divisor of {needed}, or label the nodes with their domain"
    require(len(whole) >= count, field, rule, value, fix)
    return whole[:count]


def plan_text(plan: Plan) -> str:
    """Format a plan with a row a node and a column a GPU; `L5` is learner rank 5, `E2.1` is worker 1 of engine 2."""
    layout, where, per_node = plan.layout, plan.layout.parallel, plan.layout.placement.gpus_per_node
    sequence = " with SP" if where.sequence_parallel else ""
    context = f" x CP {where.context}" if where.context > 1 else ""
    split = f"TP {where.tensor}{sequence} x PP {where.pipeline}{context} x DP {where.data}"
    kind = "logical GPUs (processes may compute on CPUs)" if layout.placement.logical_gpus else "GPUs"
    head = [
        f"{len(plan.nodes)} x {per_node} {kind}, {layout.placement.mode.value}",
        f"learner: {len(plan.learner)} ranks, {split}",
        f"engines: {layout.num_engines} of TP {layout.engine_tensor}, executor {_executor_words(plan)}",
    ]
    held: dict[Slot, list[str]] = {slot: [] for slot in plan.slots}
    for rank, slot in enumerate(plan.learner):
        held[slot].append(f"L{rank}")
    for engine, slots in enumerate(plan.engines):
        for worker, slot in enumerate(slots):
            held[slot].append(f"E{engine}" if layout.engine_tensor == 1 else f"E{engine}.{worker}")
    rows = [["node", "NVLink domain", *(f"GPU {gpu}" for gpu in range(per_node))]]
    for index, node in enumerate(plan.nodes):
        numa = [f" (NUMA {number})" for number in node.numa] or [""] * per_node
        cells = [" ".join(held[Slot(index, gpu)]) + numa[gpu] for gpu in range(per_node)]
        rows.append([node.address or node.name, node.nvlink_domain or "-", *cells])
    return "\n".join([*head, "", table(rows)])


def _executor_words(plan: Plan) -> str:
    """Name vLLM's executor for the workers of an engine."""
    if plan.layout.engine_tensor == 1:
        return "uni (in one process)"
    is_inside = all(len({slot.node for slot in slots}) == 1 for slots in plan.engines)
    return "mp (processes of one node)" if is_inside else "ray (over several nodes)"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows into columns; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
