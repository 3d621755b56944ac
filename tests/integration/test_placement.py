"""A plan on real Ray actors: each finds itself on the node and GPU that the plan says, or the error says why not.

Two Ray nodes on this machine stand for hosts; their GPUs are logical.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked.tasks import not_forked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("placement") / "found.json"
    environment = not_forked({name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"})
    script = Path(__file__).with_name("placement_on_ray.py")
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    subprocess.run([sys.executable, str(script), str(path)], env=environment, check=True, timeout=280)
    return json.loads(path.read_text())


def _places(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"node": report["node"], "gpus": report["gpus"]} for report in reports]


def test_every_rank_is_where_the_plan_says(found: dict[str, Any]) -> None:
    pairs = found["pairs"]
    assert _places(pairs["learner"]) == pairs["plan_learner"]
    assert [place["node"] for place in pairs["plan_learner"]] == [node for node in pairs["nodes"] for _ in range(4)]
    assert [place["gpus"] for place in pairs["plan_learner"]] == [["0"], ["1"], ["2"], ["3"]] * 2
    assert [report["CUDA_VISIBLE_DEVICES"] for report in pairs["learner"]] == ["0", "1", "2", "3"] * 2


def test_two_engine_sets_share_the_learners_gpus(found: dict[str, Any]) -> None:
    pairs = found["pairs"]
    assert len(pairs["engines"]) == 2 * 4
    firsts = [seats[0]["node"] for seats in pairs["plan_engines"]]
    assert [report["node"] for report in pairs["engines"]] == firsts * 2
    assert [seat for seats in pairs["plan_engines"] for seat in seats] == pairs["plan_learner"]


def test_an_engine_within_a_node_sees_all_its_gpus_and_starts_its_own_workers(found: dict[str, Any]) -> None:
    assert found["pairs"]["executors"] == ["mp"] * 8
    assert [report["CUDA_VISIBLE_DEVICES"] for report in found["pairs"]["engines"]] == ["0,1", "2,3"] * 4


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


def test_the_librarys_own_learner_starts_in_the_reservation_that_stages_share(found: dict[str, Any]) -> None:
    assert found["alive"] and found["shared"]


def test_gpus_that_no_process_can_compute_on_end_a_run_unless_the_recipe_calls_them_logical(
    found: dict[str, Any],
) -> None:
    assert found["alive"]  # with `logical_gpus`
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
