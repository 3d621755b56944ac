"""A plan on Ray: its GPUs reserved as placement groups, and each process put into the bundle of its GPU.

A bundle is one GPU. Rank i of the learner and worker i of every engine set lie in the same bundle; the fractions of
a GPU that they ask for are Ray's bookkeeping, not limits, and sum to less than one.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slipstream.config import ConfigError
from slipstream.workers.placement.config import Layout
from slipstream.workers.placement.plan import Cluster, Plan, Slot, make_plan, replanned
from slipstream.workers.session import RayNode, actor_environment, as_cluster, ray_nodes

logger = logging.getLogger(__name__)

_NODE_LABEL = "ray.io/node-id"
_LEARNERS, _ENGINES, _PROBE = 0.3, 0.6, 0.05  # of a GPU
_POLL_S = 0.5
_BUNDLES = "VLLM_RAY_BUNDLE_INDICES"


class PlacementError(RuntimeError):
    """The cluster did not give a run its GPUs within the deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A bundle, and the GPU that it stands for."""

    group: PlacementGroup
    bundle: int
    node_id: str
    address: str
    gpu_id: str  # as CUDA_VISIBLE_DEVICES names it


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start of an engine: where, with what environment, by which executor.

    Attributes:
        place: options of its Ray actor that decide where it runs.
        environment: what its process needs beside its own.
        executor: vLLM's, of its workers.
    """

    place: dict[str, Any]
    environment: dict[str, str]
    executor: str


class Reservation:
    """The GPUs of a plan, held until `release` or the end of this process."""

    def __init__(self, plan: Plan, seats: Mapping[Slot, Seat]) -> None:
        self.plan = plan
        self.seats = dict(seats)

    def learner_place(self, rank: int) -> dict[str, Any]:
        """Options that put the actor of this rank on its GPU."""
        seat = self.seats[self.plan.learner[rank]]
        return _in_bundle(seat.group, seat.bundle, learner_share(self.plan.layout))

    def engine_start(self, index: int) -> Start:
        """Start of the engine of this number.

        Within a node vLLM starts its workers itself, and the actor sees all their GPUs; over several nodes it puts
        each into a bundle that it is told. Left alone, vLLM takes Ray for any engine inside a placement group.

        Source: vLLM 0.32, `config/parallel.py __post_init__`, `v1/executor/ray_executor_v2.py _init_executor`.
        """
        seats = [self.seats[slot] for slot in self.plan.engines[index]]
        share = engine_share(self.plan.layout)
        place = _in_bundle(seats[0].group, seats[0].bundle, share)
        if len(seats) == 1:
            return Start(place=place, environment={}, executor="uni")
        # Ray shows an actor the GPU of its own bundle alone; here the actor's children use the others.
        own = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        if len({seat.node_id for seat in seats}) == 1:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(seat.gpu_id for seat in seats)
            return Start(place=place, environment=own, executor="mp")
        own[_BUNDLES] = ",".join(str(seat.bundle) for seat in seats)
        own["VLLM_RAY_PER_WORKER_GPUS"] = str(share)
        return Start(place=place | {"num_gpus": 0.0}, environment=own, executor="ray")

    def is_whole(self) -> bool:
        """Ask whether all its nodes are alive."""
        return {seat.node_id for seat in self.seats.values()} <= {node.id for node in ray_nodes()}

    def release(self) -> None:
        """Give the GPUs back; what still runs on them ends."""
        for group in {seat.group for seat in self.seats.values()}:
            remove_placement_group(group)
        self.seats.clear()


def learner_share(layout: Layout) -> float:
    """Fraction of a GPU that a learner rank asks Ray for."""
    return _floor(_LEARNERS / layout.num_learners)


def engine_share(layout: Layout) -> float:
    """Fraction of a GPU that one worker of one engine set asks Ray for."""
    return _floor(_ENGINES / layout.num_engine_sets)


_held: dict[tuple[str, Layout], Reservation] = {}
_lock = threading.Lock()


def reserved(layout: Layout) -> Reservation | None:
    """The GPUs of `layout`, reserved at the first call in a process; None for one without GPUs.

    All stages of a process that have the same layout share its reservation; another layout releases it. Where nodes
    were lost, others take their places, and what runs on the rest goes on.

    Raises:
        PlacementError: the cluster does not have them free within `placement.start_timeout_s`.
    """
    if not layout.has_gpus:
        return None
    with _lock:
        key = (ray.get_runtime_context().get_job_id(), layout)
        if key not in _held:
            while _held:
                _held.popitem()[1].release()
            _held[key] = reserve(layout)
        elif not _held[key].is_whole():
            _held[key] = renewed(_held.pop(key))
        return _held[key]


def reserve(layout: Layout) -> Reservation:
    """Reserve the GPUs of `layout` and find out which physical GPU each bundle is.

    Raises:
        PlacementError: the cluster does not have them free within `placement.start_timeout_s`; it says what was
            wanted where, and what is free there.
    """
    deadline = time.monotonic() + layout.placement.start_timeout_s
    plan, nodes = _planned(layout, lambda cluster: make_plan(layout, cluster), deadline)
    return Reservation(plan, _reserve(plan, plan.groups, nodes, deadline))


def renewed(held: Reservation) -> Reservation:
    """`held` with other nodes for those that were lost; it gives back what is reserved together with one of these.

    Raises:
        PlacementError: as `reserve`; then all of `held` is given back.
    """
    layout, before = held.plan.layout, held.plan.nodes
    deadline = time.monotonic() + layout.placement.start_timeout_s
    try:
        plan, nodes = _planned(layout, lambda cluster: replanned(held.plan, cluster), deadline)
        broken = [members for members in plan.groups if any(plan.nodes[i] != before[i] for i in members)]
        changed = {index for members in broken for index in members}
        for group in {seat.group for slot, seat in held.seats.items() if slot.node in changed}:
            remove_placement_group(group)
        kept = {slot: seat for slot, seat in held.seats.items() if slot.node not in changed}
        return Reservation(plan, kept | _reserve(plan, broken, nodes, deadline))
    except BaseException:
        held.release()
        raise


def _reserve(
    plan: Plan, wanted: Iterable[tuple[int, ...]], nodes: Mapping[str, RayNode], deadline: float
) -> dict[Slot, Seat]:
    """The seats of these of the plan's groups."""
    groups = {_group(plan, members, nodes): members for members in wanted}
    indices = sorted(index for members in groups.values() for index in members)
    addresses = ", ".join(nodes[plan.nodes[index].name].address for index in indices)
    logger.info("reserving %d GPUs on %s", plan.layout.placement.gpus_per_node * len(indices), addresses)
    try:
        waiting = {group.ready(): members for group, members in groups.items()}
        _, pending = ray.wait(list(waiting), num_returns=len(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if pending:
            missing = [index for reference in pending for index in waiting[reference]]
            raise PlacementError(_not_free(plan, sorted(missing), nodes))
        return _seats(plan, list(groups), nodes, deadline)
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise


def _planned(layout: Layout, plan_on: Callable[[Cluster], Plan], deadline: float) -> tuple[Plan, dict[str, RayNode]]:
    """The plan, as soon as the cluster is large enough for it: its nodes may still be on their way."""
    timeout_s, is_first = layout.placement.start_timeout_s, True
    while True:
        nodes = ray_nodes()
        try:
            return plan_on(as_cluster(nodes)), {node.id: node for node in nodes}
        except ConfigError as error:
            if time.monotonic() + _POLL_S > deadline:
                raise PlacementError(
                    f"no plan for the cluster within placement.start_timeout_s {timeout_s:g} s: {error}; {_free()}"
                ) from error
            if is_first:
                logger.warning("waiting up to %g s for nodes to join: %s", timeout_s, error)
            is_first = False
            time.sleep(_POLL_S)


def _group(plan: Plan, members: Sequence[int], nodes: Mapping[str, RayNode]) -> PlacementGroup:
    """One bundle for each GPU that the plan takes of these nodes, pinned to them."""
    bundles, selectors = [], []
    for index in members:
        node = nodes[plan.nodes[index].name]
        for _ in range(plan.layout.placement.gpus_per_node):
            bundles.append(_bundle(node))
            selectors.append({_NODE_LABEL: node.id})
    strategy = "STRICT_PACK" if len(members) == 1 else "PACK"
    return placement_group(bundles, strategy=strategy, bundle_label_selector=selectors)


def _bundle(node: RayNode) -> dict[str, float]:
    """A GPU and, where the node has one for each, a core that no other work gets."""
    return {"GPU": 1.0, "CPU": 1.0} if node.num_cpus >= node.num_gpus else {"GPU": 1.0}


def _seats(
    plan: Plan, groups: Sequence[PlacementGroup], nodes: Mapping[str, RayNode], deadline: float
) -> dict[Slot, Seat]:
    """Ask in every bundle which GPU it is, and number a node's GPUs in their own order."""
    environment = {"env_vars": actor_environment({})}
    probe: Any = ray.remote(num_cpus=0, runtime_env=environment)(_gpu_here)
    asked = {
        probe.options(**_in_bundle(group, bundle, _PROBE)).remote(): (group, bundle)
        for group in groups
        for bundle in range(group.bundle_count)
    }
    answers, pending = ray.wait(list(asked), num_returns=len(asked), timeout=max(_POLL_S, deadline - time.monotonic()))
    if pending:
        timeout_s = plan.layout.placement.start_timeout_s
        raise PlacementError(
            f"{len(pending)} of {len(asked)} reserved GPUs ran no process within placement.start_timeout_s "
            f"{timeout_s:g} s; {_free()}"
        )
    by_node: dict[int, list[Seat]] = {}
    index_of = {node.name: index for index, node in enumerate(plan.nodes)}
    for reference in answers:
        group, bundle = asked[reference]
        node_id, gpu_id = ray.get(reference)
        seat = Seat(group=group, bundle=bundle, node_id=node_id, address=nodes[node_id].address, gpu_id=gpu_id)
        by_node.setdefault(index_of[node_id], []).append(seat)
    return {
        Slot(index, gpu): seat
        for index, seats in by_node.items()
        for gpu, seat in enumerate(sorted(seats, key=lambda seat: _gpu_order(seat.gpu_id)))
    }


def _gpu_here() -> tuple[str, str]:
    """Node and GPU of the process that runs this."""
    context = ray.get_runtime_context()
    (gpu_id,) = context.get_accelerator_ids()["GPU"]
    return context.get_node_id(), str(gpu_id)


def require_gpu(process: str, *, problem: Callable[[], str]) -> None:
    """Refuse to compute on the CPU in a process to which Ray gave a GPU: it would be slow, and say nothing.

    Args:
        process: its name.
        problem: why it would compute on the CPU; empty if it would not. Asked only where Ray gave a GPU.
    Raises:
        PlacementError: it would.
    """
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"] if ray.is_initialized() else []
    bundles = os.environ.get(_BUNDLES)  # of an engine whose workers are actors of their own
    if not ids and not bundles:
        return
    found = problem()
    if found:
        import torch

        given = f"GPU {', '.join(map(str, ids))}" if ids else f"the GPUs of bundles {bundles}"
        raise PlacementError(
            f"{process} on {socket.gethostname()} must compute on what Ray assigned to it, {given}, but {found} "
            f"(CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES')!r}, torch {torch.__version__}, "
            f"torch.version.cuda {torch.version.cuda}): install requirements/gpu.lock and a driver with which "
            "nvidia-smi lists the GPU, or set placement.logical_gpus: true if Ray's GPUs are only counted"
        )


def _in_bundle(group: PlacementGroup, bundle: int, share: float) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return {"num_gpus": share, "scheduling_strategy": strategy}


def _not_free(plan: Plan, missing: Iterable[int], nodes: Mapping[str, RayNode]) -> str:
    """Text of what was wanted, and what is there instead."""
    timeout_s = plan.layout.placement.start_timeout_s
    now = {node.id: node for node in ray_nodes()}
    words = []
    for index in missing:
        name = plan.nodes[index].name
        wanted, count = _bundle(nodes[name]), plan.layout.placement.gpus_per_node
        resources = " and ".join(f"{count * amount:g} {kind}" for kind, amount in wanted.items())
        node = now.get(name)
        words.append(
            f"{nodes[name].address} wanted {resources}, "
            + ("is gone" if node is None else f"has {node.free_gpus:g} GPU and {node.free_cpus:g} CPU free")
        )
    return (
        f"GPUs not free within placement.start_timeout_s {timeout_s:g} s: {'; '.join(words)}: "
        "end what holds them, or change placement"
    )


def _free() -> str:
    """Text of what every node has free."""
    words = [
        f"{n.address} {n.free_gpus:g} of {n.num_gpus} GPU, {n.free_cpus:g} of {n.num_cpus:g} CPU" for n in ray_nodes()
    ]
    return f"free: {'; '.join(words)}"


def _gpu_order(gpu_id: str) -> tuple[int, str]:
    return (int(gpu_id), "") if gpu_id.isdigit() else (0, gpu_id)


def _floor(share: float) -> float:
    """Ray counts in ten-thousandths; rounded down, so that the sum stays below one."""
    return int(share * 10_000) / 10_000
