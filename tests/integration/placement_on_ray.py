"""Run by `test_placement.py` in a process of its own: two hosts of four logical GPUs each, made of Ray's own parts.

Prints one JSON object: what real actors reported, beside what the plan says.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from slipstream import cli
from slipstream.engine.config import EngineConfig
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.workers import reservation as placement
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import start_learner
from slipstream.workers.placement.config import Layout, PlacementConfig
from slipstream.workers.session import NVLINK_LABEL, ray_nodes

QUIET = {"include_dashboard": False, "object_store_memory": 100 << 20}


class Here:
    def where(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        names = ("CUDA_VISIBLE_DEVICES", "VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_PER_WORKER_GPUS")
        return {
            "node": context.get_node_id(),
            "pid": os.getpid(),
            "gpus": context.get_accelerator_ids()["GPU"],
            "group": context.get_placement_group_id(),
            **{name: os.environ.get(name) for name in names},
        }


def layout(*, engine_tensor: int = 1, timeout_s: float = 60.0, nodes: int = 2, per_node: int = 4) -> Layout:
    gpus = nodes * per_node
    return Layout(
        placement=PlacementConfig(nodes=nodes, gpus_per_node=per_node, start_timeout_s=timeout_s),
        parallel=ParallelConfig(tensor=2, data=gpus // 2),
        engine_tensor=engine_tensor,
        num_engines=gpus // engine_tensor,
        num_engine_sets=2,
    )


def report(reservation: placement.Reservation, *, num_sets: int) -> dict[str, Any]:
    """Ask every learner rank, and the first worker of every engine of `num_sets` sets, where it runs."""
    here: Any = ray.remote(Here)
    plan = reservation.plan
    ranks: list[Any] = [
        here.options(num_cpus=0, **reservation.learner_place(rank)).remote() for rank in range(len(plan.learner))
    ]
    starts = [reservation.engine_start(index) for _ in range(num_sets) for index in range(len(plan.engines))]
    engines: list[Any] = [
        here.options(num_cpus=0, **start.place, runtime_env={"env_vars": start.environment}).remote()
        for start in starts
    ]
    found = {
        "learner": ray.get([rank.where.remote() for rank in ranks]),
        "engines": ray.get([engine.where.remote() for engine in engines]),
        "executors": [start.executor for start in starts],
        "plan_learner": [_seat(reservation.seats[slot]) for slot in plan.learner],
        "plan_engines": [[_seat(reservation.seats[slot]) for slot in slots] for slots in plan.engines],
        "nodes": [node.name for node in plan.nodes],
    }
    for actor in (*ranks, *engines):
        ray.kill(actor)
    return found


def _seat(seat: placement.Seat) -> dict[str, Any]:
    return {"node": seat.node_id, "gpus": [seat.gpu_id]}


def refused(reserve: Any) -> dict[str, Any]:
    """Try what cannot be placed; return its error and its seconds."""
    start = time.monotonic()
    try:
        reserve()
    except placement.PlacementError as error:
        return {"error": str(error), "elapsed_s": time.monotonic() - start}
    return {"error": None}


def start_error(start: Callable[..., Any], where: Layout) -> str:
    """Start a learner or engines on GPUs that do not exist; return the error."""
    try:
        with start(LearnerConfig(parallel=where.parallel, num_threads=1), layout=where):
            return "started"
    except RayError as error:
        return str(error)


def engine_of(_: LearnerConfig, *, layout: Layout) -> Any:
    """Start engines of a policy that they never come to read."""
    policy = Path(sys.argv[1]).with_name("policy")
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    return start_engine(
        policy, config=EngineConfig(max_model_len=32, max_num_seqs=4, num_engines=2, kv_cache_gib=0.1), layout=layout
    )


def lost_node(cluster: Cluster) -> dict[str, Any]:
    """Remove one of the two nodes of a reservation, with a third to spare; return where its actors are then."""
    pair = layout(per_node=2)
    here: Any = ray.remote(Here)

    def rank(reservation: placement.Reservation, number: int) -> Any:
        return here.options(num_cpus=0, **reservation.learner_place(number)).remote()

    held = placement.reserved(pair)
    assert held is not None
    ranks = [rank(held, number) for number in range(4)]
    before = ray.get([each.where.remote() for each in ranks])
    victim = next(node for node in cluster.worker_nodes if node.node_id in {node.name for node in held.plan.nodes})
    spare = next(node.id for node in ray_nodes() if node.id not in {node.name for node in held.plan.nodes})
    cluster.remove_node(victim, allow_graceful=False)
    while victim.node_id in {node.id for node in ray_nodes()}:
        time.sleep(0.1)
    now = placement.reserved(pair)
    assert now is not None
    lost = [number for number in range(4) if before[number]["node"] == victim.node_id]
    for number in lost:
        ranks[number] = rank(now, number)
    after = ray.get([each.where.remote() for each in ranks], timeout=60)
    return {"lost": lost, "spare": spare, "before": before, "after": after, "is_kept": placement.reserved(pair) is now}


def main() -> None:
    cluster = Cluster()
    for number in range(2):
        cluster.add_node(num_cpus=4, num_gpus=4, labels={NVLINK_LABEL: "a"}, **({} if number else QUIET))
    ray.init(address=cluster.address, log_to_driver=False)
    found: dict[str, Any] = {"cluster": [(node.num_gpus, dict(node.labels)) for node in ray_nodes()]}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(["cluster"])
    found["printed"] = printed.getvalue()

    pairs = layout(engine_tensor=2)
    held = placement.reserve(pairs)
    found["pairs"] = report(held, num_sets=2)  # two engine sets and the learner in the same bundles
    found["busy"] = refused(lambda: placement.reserve(layout(timeout_s=2.0, per_node=2)))
    held.release()

    wide = placement.reserve(layout(engine_tensor=4, per_node=2))
    found["wide"] = report(wide, num_sets=1)
    wide.release()

    # The library's own learner, through the reservation that stages share.
    ranks = Layout(
        placement=PlacementConfig(nodes=2, gpus_per_node=1, logical_gpus=True),
        parallel=ParallelConfig(data=2),
        num_engines=2,
    )
    with start_learner(LearnerConfig(parallel=ranks.parallel, num_threads=1), layout=ranks) as learner:
        found["alive"] = not learner.lost_workers()
        shared = placement.reserved(ranks)
        found["shared"] = shared is placement.reserved(ranks)
    real = replace(ranks, placement=replace(ranks.placement, logical_gpus=False))
    found["blind learner"], found["blind engine"] = start_error(start_learner, real), start_error(engine_of, real)
    cluster.add_node(num_cpus=4, num_gpus=4, labels={NVLINK_LABEL: "a"})
    found["lost"] = lost_node(cluster)
    Path(sys.argv[1]).write_text(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
