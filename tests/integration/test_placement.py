"""A plan on real Ray actors: each finds itself on the node and GPU that the plan says, or the error says why not.

Two Ray nodes on this machine stand for hosts; their four GPUs each are logical. This file is run in a process of its
own too: it prints what real actors reported, beside what the plan says.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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
from tests.forked.tasks import not_forked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("placement") / "found.json"
    environment = not_forked({name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"})
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    subprocess.run([sys.executable, __file__, str(path)], env=environment, check=True, timeout=280)
    return json.loads(path.read_text())


def _places(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"node": report["node"], "gpus": report["gpus"]} for report in reports]


def test_ranks_and_two_sets_of_engines_are_where_the_plan_says(found: dict[str, Any]) -> None:
    pairs = found["pairs"]
    assert _places(pairs["learner"]) == pairs["plan_learner"]
    assert [place["node"] for place in pairs["plan_learner"]] == [node for node in pairs["nodes"] for _ in range(4)]
    assert [place["gpus"] for place in pairs["plan_learner"]] == [["0"], ["1"], ["2"], ["3"]] * 2
    assert [report["CUDA_VISIBLE_DEVICES"] for report in pairs["learner"]] == ["0", "1", "2", "3"] * 2
    # Both sets share the learner's GPUs. An engine sees all of its own on a node, and starts its own workers there.
    firsts = [seats[0]["node"] for seats in pairs["plan_engines"]]
    assert [report["node"] for report in pairs["engines"]] == firsts * 2
    assert [seat for seats in pairs["plan_engines"] for seat in seats] == pairs["plan_learner"]
    assert [report["CUDA_VISIBLE_DEVICES"] for report in pairs["engines"]] == ["0,1", "2,3"] * 4
    assert pairs["executors"] == ["mp"] * 8


def test_an_engine_over_nodes_leaves_its_workers_to_ray_in_its_own_bundles(found: dict[str, Any]) -> None:
    wide = found["wide"]
    assert wide["executors"] == ["ray"]
    (engine,) = wide["engines"]
    assert engine["gpus"] == []  # its workers hold the GPUs
    assert sorted(engine["VLLM_RAY_BUNDLE_INDICES"].split(",")) == ["0", "1", "2", "3"]  # two nodes of two
    assert engine["VLLM_RAY_PER_WORKER_GPUS"] == "0.3"
    assert {report["group"] for report in wide["learner"]} == {engine["group"]}  # one group over both nodes
    assert _places(wide["learner"]) == wide["plan_learner"]


def test_gpus_that_are_held_end_in_an_error_within_the_deadline(found: dict[str, Any]) -> None:
    busy = found["busy"]
    assert busy["error"].startswith("GPUs not free within placement.start_timeout_s 2 s: ")
    assert busy["error"].count("wanted 2 GPU and 2 CPU, has 0 GPU and 0 CPU free") == 2
    assert busy["elapsed_s"] < 8


def test_gpus_that_no_process_can_compute_on_end_a_run_unless_the_recipe_calls_them_logical(
    found: dict[str, Any],
) -> None:
    assert found["alive"] and found["shared"]  # with `logical_gpus`, in the reservation that stages share
    for name, process in (("blind learner", r"learner rank [01]"), ("blind engine", "engine")):
        assert re.search(process + r" on \S+ must compute on what Ray assigned to it, GPU 0", found[name]), found[name]
        assert "or set placement.logical_gpus: true" in found[name]


def test_a_lost_node_is_replaced_and_what_runs_on_the_other_goes_on(found: dict[str, Any]) -> None:
    lost = found["lost"]
    assert lost["lost"] in ([0, 1], [2, 3])
    for number, (before, after) in enumerate(zip(lost["before"], lost["after"], strict=True)):
        if number in lost["lost"]:
            assert after["node"] == lost["spare"] != before["node"]
        else:
            assert after == before  # the same process: it was not started anew
    assert lost["is_kept"]


def test_the_cluster_is_listed_with_its_labels(found: dict[str, Any]) -> None:
    assert [gpus for gpus, _ in found["cluster"]] == [4, 4]
    assert all(labels["ray.io/gpu-domain"] == "a" for _, labels in found["cluster"])
    head, _, *rows = found["printed"].splitlines()
    assert head.split("  ")[0] == "node" and "object store, GB" in head
    assert len(rows) == 2
    assert all("4 of 4" in row and "ray.io/gpu-domain=a" in row for row in rows)


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


def _actor(place: dict[str, Any], **how: Any) -> Any:
    here: Any = ray.remote(Here)
    return here.options(num_cpus=0, **place, **how).remote()


def _where(actors: Sequence[Any]) -> list[dict[str, Any]]:
    return ray.get([each.where.remote() for each in actors], timeout=60)


def _layout(*, engine_tensor: int = 1, timeout_s: float = 60.0, per_node: int = 4) -> Layout:
    gpus = 2 * per_node
    return Layout(
        placement=PlacementConfig(nodes=2, gpus_per_node=per_node, start_timeout_s=timeout_s),
        parallel=ParallelConfig(tensor=2, data=gpus // 2),
        engine_tensor=engine_tensor,
        num_engines=gpus // engine_tensor,
        num_engine_sets=2,
    )


def _report(reservation: placement.Reservation, *, num_sets: int) -> dict[str, Any]:
    """Ask every learner rank, and the first worker of every engine of `num_sets` sets, where it runs."""

    def seat(slot: Any) -> dict[str, Any]:
        return {"node": reservation.seats[slot].node_id, "gpus": [reservation.seats[slot].gpu_id]}

    plan = reservation.plan
    ranks = [_actor(reservation.learner_place(rank)) for rank in range(len(plan.learner))]
    starts = [reservation.engine_start(index) for _ in range(num_sets) for index in range(len(plan.engines))]
    engines = [_actor(start.place, runtime_env={"env_vars": start.environment}) for start in starts]
    found = {
        "learner": _where(ranks),
        "engines": _where(engines),
        "executors": [start.executor for start in starts],
        "plan_learner": [seat(slot) for slot in plan.learner],
        "plan_engines": [[seat(slot) for slot in slots] for slots in plan.engines],
        "nodes": [node.name for node in plan.nodes],
    }
    for actor in (*ranks, *engines):
        ray.kill(actor)
    return found


def _refused(layout: Layout) -> dict[str, Any]:
    """Try what cannot be placed; return its error and its seconds."""
    start_s = time.monotonic()
    try:
        placement.reserve(layout)
    except placement.PlacementError as error:
        return {"error": str(error), "elapsed_s": time.monotonic() - start_s}
    return {"error": None}


def _start_error(start: Callable[..., Any], where: Layout) -> str:
    """Start a learner or engines on GPUs that do not exist; return the error."""
    try:
        with start(LearnerConfig(parallel=where.parallel, num_threads=1), layout=where):
            return "started"
    except RayError as error:
        return str(error)


def _engine_of(_: LearnerConfig, *, layout: Layout) -> Any:
    """Start engines of a policy that they never come to read."""
    policy = Path(sys.argv[1]).with_name("policy")
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    config = EngineConfig(max_model_len=32, max_num_seqs=4, num_engines=2, kv_cache_gib=0.1)
    return start_engine(policy, config=config, layout=layout)


def _lost_node(cluster: Cluster) -> dict[str, Any]:
    """Remove one of the two nodes of a reservation, with a third to spare; return where its actors are then."""
    pair = _layout(per_node=2)
    held = placement.reserved(pair)
    assert held is not None
    ranks = [_actor(held.learner_place(number)) for number in range(4)]
    before = _where(ranks)
    names = {node.name for node in held.plan.nodes}
    victim = next(node for node in cluster.worker_nodes if node.node_id in names)
    spare = next(node.name for node in ray_nodes() if node.name not in names)
    cluster.remove_node(victim, allow_graceful=False)
    while victim.node_id in {node.name for node in ray_nodes()}:
        time.sleep(0.1)
    now = placement.reserved(pair)
    assert now is not None
    lost = [number for number in range(4) if before[number]["node"] == victim.node_id]
    for number in lost:
        ranks[number] = _actor(now.learner_place(number))
    after, is_kept = _where(ranks), placement.reserved(pair) is now
    return {"lost": lost, "spare": spare, "before": before, "after": after, "is_kept": is_kept}


def main() -> None:
    cluster, node = Cluster(), {"num_cpus": 4, "num_gpus": 4, "labels": {NVLINK_LABEL: "a"}}
    cluster.add_node(**node, include_dashboard=False, object_store_memory=100 << 20)
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    found: dict[str, Any] = {"cluster": [(node.num_gpus, dict(node.labels)) for node in ray_nodes()]}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(["cluster"])
    found["printed"] = printed.getvalue()

    held = placement.reserve(_layout(engine_tensor=2))
    found["pairs"] = _report(held, num_sets=2)  # two engine sets and the learner in the same bundles
    found["busy"] = _refused(_layout(timeout_s=2.0, per_node=2))
    held.release()
    wide = placement.reserve(_layout(engine_tensor=4, per_node=2))
    found["wide"] = _report(wide, num_sets=1)
    wide.release()

    # The library's own learner, through the reservation that stages share.
    single = PlacementConfig(nodes=2, gpus_per_node=1, logical_gpus=True)
    ranks = Layout(placement=single, parallel=ParallelConfig(data=2), num_engines=2)
    with start_learner(LearnerConfig(parallel=ranks.parallel, num_threads=1), layout=ranks) as learner:
        found["alive"] = not learner.lost_workers()
        found["shared"] = placement.reserved(ranks) is placement.reserved(ranks)
    real = replace(ranks, placement=replace(single, logical_gpus=False))
    found["blind learner"], found["blind engine"] = _start_error(start_learner, real), _start_error(_engine_of, real)
    cluster.add_node(**node)
    found["lost"] = _lost_node(cluster)
    Path(sys.argv[1]).write_text(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
