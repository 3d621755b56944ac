"""Reservation of a plan's GPUs on Ray: placement groups, and the bundle in which each process runs.

A bundle is one GPU. Rank i of the learner and worker i of every engine set run in the same bundle. The fractions of a
GPU that these processes request are Ray's bookkeeping, not limits, and sum to less than one.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slipstream.config import ConfigError
from slipstream.workers.placement.config import Layout
from slipstream.workers.placement.plan import Cluster, Node, Plan, Slot, make_plan, plan_text, replanned
from slipstream.workers.session import actor_environment, ray_nodes, with_numa

logger = logging.getLogger(__name__)

_NODE_LABEL = "ray.io/node-id"
_LEARNERS, _ENGINES, _PROBE = 0.3, 0.6, 0.05  # of a GPU
_POLL_S = 0.5
_BUNDLES = "VLLM_RAY_BUNDLE_INDICES"


class PlacementError(RuntimeError):
    """Error for GPUs that the cluster did not provide within the deadline, or that a process cannot use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A bundle, and its physical GPU."""

    group: PlacementGroup
    bundle: int
    node_id: str
    gpu_id: str  # as in CUDA_VISIBLE_DEVICES


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Ray and vLLM settings that start an engine on its GPUs."""

    place: dict[str, Any]  # placement options of the engine's Ray actor
    environment: dict[str, str]  # additional variables of the engine's process
    executor: str  # vLLM's, of the engine's workers: `uni`, `mp` or `ray`


@dataclass(slots=True)
class Reservation:
    """Reserved GPUs of a plan, held until `release` or the end of this process."""

    plan: Plan
    seats: dict[Slot, Seat]

    def learner_place(self, rank: int) -> dict[str, Any]:
        """Return Ray's options that place the actor of this rank on its GPU."""
        seat = self.seats[self.plan.learner[rank]]
        return _in_bundle(seat.group, seat.bundle, learner_share(self.plan.layout))

    def engine_start(self, index: int) -> Start:
        """Return the start of the engine of this number.

        Within a node vLLM starts its workers itself, and the actor sees the GPUs of all workers. Over several nodes
        vLLM puts each worker into a named bundle. Without a named executor vLLM takes Ray's in a placement group.

        Source: vLLM 0.32, `config/parallel.py __post_init__`, `v1/executor/ray_executor_v2.py _init_executor`.
        """
        seats = [self.seats[slot] for slot in self.plan.engines[index]]
        share = engine_share(self.plan.layout)
        place = _in_bundle(seats[0].group, seats[0].bundle, share)
        if len(seats) == 1:
            return Start(place=place, environment={}, executor="uni")
        # Ray shows an actor the GPU of its own bundle alone, but the actor's child processes use the other bundles.
        own = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        if len({seat.node_id for seat in seats}) == 1:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(seat.gpu_id for seat in seats)
            return Start(place=place, environment=own, executor="mp")
        own[_BUNDLES] = ",".join(str(seat.bundle) for seat in seats)
        own["VLLM_RAY_PER_WORKER_GPUS"] = str(share)
        return Start(place=place | {"num_gpus": 0.0}, environment=own, executor="ray")

    def is_whole(self) -> bool:
        """Return True if all nodes of the reservation are alive."""
        return {seat.node_id for seat in self.seats.values()} <= {node.name for node in ray_nodes()}

    def release(self) -> None:
        """Release the GPUs; Ray kills the processes that run on them."""
        for group in {seat.group for seat in self.seats.values()}:
            remove_placement_group(group)
        self.seats.clear()


def learner_share(layout: Layout) -> float:
    """Fraction of a GPU that a learner rank requests from Ray."""
    return _floor(_LEARNERS / layout.num_learners)


def engine_share(layout: Layout) -> float:
    """Fraction of a GPU that one worker of one engine set requests from Ray."""
    return _floor(_ENGINES / layout.num_engine_sets)


_held: dict[tuple[str, Layout], Reservation] = {}
_lock = threading.Lock()


def reserved(layout: Layout) -> Reservation | None:
    """Return the reservation of `layout`, made at the first call in a process; None for a layout without GPUs.

    The stages of a process share the reservation of a layout; another layout releases it. Lost nodes are replaced, and
    processes on the other nodes keep running.

    Raises:
        PlacementError: the GPUs are not free within `placement.start_timeout_s`.
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
    """Reserve the GPUs of `layout` and look up the physical GPU of each bundle; raises as `reserved` does."""
    deadline = time.monotonic() + layout.placement.start_timeout_s
    plan = _planned(layout, lambda cluster: make_plan(layout, cluster), deadline)
    return Reservation(plan, _reserve(plan, plan.groups, deadline))


def renewed(held: Reservation) -> Reservation:
    """Replace the lost nodes of `held`; placement groups that contain a lost node are reserved anew.

    After an error, as `reserved` raises it, all of `held` is released.
    """
    layout, before = held.plan.layout, held.plan.nodes
    deadline = time.monotonic() + layout.placement.start_timeout_s
    try:
        plan = _planned(layout, lambda cluster: replanned(held.plan, cluster), deadline)
        broken = [members for members in plan.groups if any(plan.nodes[i] != before[i] for i in members)]
        changed = {index for members in broken for index in members}
        for group in {seat.group for slot, seat in held.seats.items() if slot.node in changed}:
            remove_placement_group(group)
        kept = {slot: seat for slot, seat in held.seats.items() if slot.node not in changed}
        return Reservation(plan, kept | _reserve(plan, broken, deadline))
    except BaseException:
        held.release()
        raise


def _reserve(plan: Plan, wanted: Iterable[tuple[int, ...]], deadline: float) -> dict[Slot, Seat]:
    """Reserve these groups of the plan's nodes."""
    groups = {_group(plan, members): members for members in wanted}
    indices = sorted(index for members in groups.values() for index in members)
    addresses = ", ".join(plan.nodes[index].address for index in indices)
    logger.info("reserving %d GPUs on %s", plan.layout.placement.gpus_per_node * len(indices), addresses)
    try:
        waiting = {group.ready(): members for group, members in groups.items()}
        _, pending = ray.wait(list(waiting), num_returns=len(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if pending:
            missing = [index for reference in pending for index in waiting[reference]]
            raise PlacementError(_not_free(plan, sorted(missing)))
        return _seats(plan, list(groups), deadline)
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise


def _planned(layout: Layout, plan_on: Callable[[Cluster], Plan], deadline: float) -> Plan:
    """Make the plan as soon as the cluster has enough nodes, which may join until the deadline."""
    timeout_s, is_first = layout.placement.start_timeout_s, True
    while True:
        nodes = ray_nodes()
        try:
            plan = plan_on([with_numa(node) for node in nodes])
            logger.info("placement: %s", plan_text(plan))
            return plan
        except ConfigError as error:
            if time.monotonic() + _POLL_S > deadline:
                raise PlacementError(
                    f"no plan for the cluster within placement.start_timeout_s {timeout_s:g} s: {error}; {_free()}"
                ) from error
            if is_first:
                logger.warning("waiting up to %g s for nodes to join: %s", timeout_s, error)
            is_first = False
            time.sleep(_POLL_S)


def _group(plan: Plan, members: Sequence[int]) -> PlacementGroup:
    """Request a bundle for each GPU that the plan takes of these nodes, pinned to the nodes."""
    per_node = plan.layout.placement.gpus_per_node
    by_bundle = [plan.nodes[index] for index in members for _ in range(per_node)]
    return placement_group(
        [_bundle(node) for node in by_bundle],
        strategy="STRICT_PACK" if len(members) == 1 else "PACK",
        bundle_label_selector=[{_NODE_LABEL: node.name} for node in by_bundle],
    )


def _bundle(node: Node) -> dict[str, float]:
    """Resources of a bundle: a GPU and, where the node has enough cores, a core."""
    return {"GPU": 1.0, "CPU": 1.0} if node.num_cpus >= node.num_gpus else {"GPU": 1.0}


def _seats(plan: Plan, groups: Sequence[PlacementGroup], deadline: float) -> dict[Slot, Seat]:
    """Look up the physical GPU of every bundle, and number the GPUs of a node by their ids."""
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
        seat = Seat(group=group, bundle=bundle, node_id=node_id, gpu_id=gpu_id)
        by_node.setdefault(index_of[node_id], []).append(seat)
    return {
        Slot(index, gpu): seat
        for index, seats in by_node.items()
        for gpu, seat in enumerate(sorted(seats, key=lambda seat: (len(seat.gpu_id), seat.gpu_id)))  # 9 before 10
    }


def _gpu_here() -> tuple[str, str]:
    """Return the node and the GPU of this process."""
    context = ray.get_runtime_context()
    (gpu_id,) = context.get_accelerator_ids()["GPU"]
    return context.get_node_id(), str(gpu_id)


def require_gpu(process: str, *, problem: Callable[[], str]) -> None:
    """Refuse to compute on the CPU in a process to which Ray assigned a GPU; the run would be slow without an error.

    Args:
        problem: returns why the process would use the CPU, or an empty string; called only with an assigned GPU.
    """
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"] if ray.is_initialized() else []
    bundles = os.environ.get(_BUNDLES)  # set for an engine whose workers are Ray actors
    if not ids and not bundles:
        return
    if found := problem():
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


def _not_free(plan: Plan, missing: Iterable[int]) -> str:
    """Error text with the request and the free resources of each missing node."""
    placement, now = plan.layout.placement, {node.name: node for node in ray_nodes()}
    words = []
    for index in missing:
        node = plan.nodes[index]
        wanted = " and ".join(f"{placement.gpus_per_node * amount:g} {kind}" for kind, amount in _bundle(node).items())
        left = now.get(node.name)
        found = "is gone" if left is None else f"has {left.free_gpus:g} GPU and {left.free_cpus:g} CPU free"
        words.append(f"{node.address} wanted {wanted}, {found}")
    return (
        f"GPUs not free within placement.start_timeout_s {placement.start_timeout_s:g} s: {'; '.join(words)}: "
        "end what holds them, or change placement"
    )


def _free() -> str:
    """Text of the free resources of every node."""
    words = [
        f"{n.address} {n.free_gpus:g} of {n.num_gpus} GPU, {n.free_cpus:g} of {n.num_cpus:g} CPU" for n in ray_nodes()
    ]
    return f"free: {'; '.join(words)}"


def _floor(share: float) -> float:
    """Round down to Ray's ten-thousandths, so that the sum stays below one."""
    return int(share * 10_000) / 10_000
