"""Whole arms over several hosts: the same training as on one, with weights that travel between hosts, and lossless."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

from tests.cluster.hosts import Cluster

_TWO_BY_TWO = {"parallel": {"tensor": 2, "data": 2}}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "one host": {"placement": {"nodes": 1, "gpus_per_node": 1}},
    "split": {
        "placement": {"mode": "split", "nodes": 3, "gpus_per_node": 2, "generation_nodes": 1, "training_nodes": 2},
        "learner": _TWO_BY_TWO,
        "engine": {"num_engines": 2},
    },
    "colocated": {
        "placement": {"nodes": 2, "gpus_per_node": 2},
        "learner": _TWO_BY_TWO,
        "engine": {"num_engines": 4},
    },
}


@pytest.fixture(scope="module")
def arms(cluster: Cluster) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="slipstream-cluster-") as directory:  # all hosts see it
        return cluster.call("arms", "train_arms", directory, _LAYOUTS, "split", timeout_s=900)


def test_split_learner_and_engines_share_no_host(arms: dict[str, Any]) -> None:
    learner, engines = arms["split"]["hosts"]["learner"], arms["split"]["hosts"]["engines"]

    assert learner[0] == learner[1] != learner[2] == learner[3]  # a tensor-parallel pair inside a host
    assert len(engines) == 2
    assert len(set(engines)) == 1
    assert not set(engines) & set(learner)


def test_colocated_engines_are_on_the_hosts_of_the_learners_ranks(arms: dict[str, Any]) -> None:
    hosts = arms["colocated"]["hosts"]

    assert hosts["engines"] == hosts["learner"]
    assert len(set(hosts["engines"])) == 2


@pytest.mark.parametrize("name", ["split", "colocated"])
def test_training_over_hosts_is_that_of_one_host(arms: dict[str, Any], name: str) -> None:
    alone, apart = arms["one host"]["steps"], arms[name]["steps"]

    assert len(set(arms["one host"]["hosts"]["learner"] + arms["one host"]["hosts"]["engines"])) == 1
    for field in ("reward", "num_tokens"):
        assert [step[field] for step in apart] == [step[field] for step in alone]
    for field in ("loss", "grad_norm"):
        assert [step[field] for step in apart] == pytest.approx([step[field] for step in alone], rel=1e-4, abs=1e-6)
    assert len(alone) == 3
    assert min(step["grad_norm"] for step in alone) > 0
    assert min(step["num_accepted"] for step in apart) > 0


@pytest.mark.parametrize("name", ["split", "colocated"])
def test_between_hosts_weights_travel_by_gloo_and_every_tensor_is_compared(arms: dict[str, Any], name: str) -> None:
    assert "refit: weights travel by gloo" in arms[name]["log"]
    assert min(step["num_compared"] for step in arms[name]["steps"]) > 47  # the policy's, and the draft's


def test_the_speculation_of_engines_on_a_host_of_their_own_is_certified(arms: dict[str, Any]) -> None:
    certificate = arms["split"]["certificate"]

    assert certificate["verdict"] == "lossless", certificate["reason"]
    assert certificate["num_tokens"] >= 600
