"""Start of a local Ray, the description of a machine, and Ray's nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.workers import session
from slipstream.workers.calls import Worker, machines
from slipstream.workers.placement.plan import Node
from slipstream.workers.session import (
    NUMA_LABEL,
    NVLINK_LABEL,
    RayNode,
    as_cluster,
    counted,
    machine,
    require_here,
    start_patiently,
)


class Starting:
    """A Ray that fails to start as often as told."""

    def __init__(self, num_failures: int, message: str) -> None:
        self.num_failures, self.message, self.num_starts = num_failures, message, 0

    def __call__(self) -> None:
        self.num_starts += 1
        if self.num_starts <= self.num_failures:
            raise Exception(self.message)


def test_a_ray_that_is_slow_to_start_is_started_again() -> None:
    start = Starting(2, "The current node timed out during startup.")
    start_patiently(start)
    assert start.num_starts == 3


def test_a_ray_that_never_starts_is_an_error_that_another_attempt_may_outlive() -> None:
    start = Starting(9, "The current node timed out during startup.")
    with pytest.raises(TimeoutError, match="must start within 30 s, and in 3 attempts it did not"):
        start_patiently(start)
    assert start.num_starts == 3


def test_another_error_of_ray_is_raised_at_once() -> None:
    start = Starting(9, "no such address")
    with pytest.raises(Exception, match="no such address"):
        start_patiently(start)
    assert start.num_starts == 1


class Ray:
    """Records how it was initialised."""

    def __init__(self, *, is_initialized: bool = False) -> None:
        self.inits: list[dict[str, Any]] = []
        self._is_initialized = is_initialized

    def is_initialized(self) -> bool:
        return self._is_initialized

    def init(self, **arguments: Any) -> None:
        self.inits.append(arguments)


QUIET = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}


@pytest.mark.parametrize("address", [None, "", " ", "local"])
def test_without_an_address_a_run_starts_an_instance_of_its_own(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray()
    monkeypatch.setattr(session, "ray", ray)
    monkeypatch.setattr(session.os, "environ", {} if address is None else {"RAY_ADDRESS": address})
    session.connect()
    own = {"address": "local", "object_store_memory": 200 << 20, "include_dashboard": False}
    assert ray.inits == [{**own, "_node_ip_address": "127.0.0.1", **QUIET}]


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "ray://head:10001", "auto"])
def test_with_an_address_a_run_connects_to_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray()
    monkeypatch.setattr(session, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", address)
    session.connect()
    assert ray.inits == [{"address": address, **QUIET}]


def test_a_process_that_is_connected_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod, where Flyte's plugin has connected it."""
    ray = Ray(is_initialized=True)
    monkeypatch.setattr(session, "ray", ray)
    session.connect()
    assert ray.inits == []


def test_what_there_is_more_than_once_is_counted() -> None:
    assert counted(["NVIDIA GB200", "NVIDIA GB200", "NVIDIA H200"]) == "2 x NVIDIA GB200; NVIDIA H200"
    assert counted([]) == ""


def test_hosts_are_counted_once_whatever_number_of_engines_they_run() -> None:
    workers = [Worker(actor=None, name=f"engine {i}", node_id=node, machine="aarch64") for i, node in enumerate("aab")]
    assert machines(workers) == "2 x aarch64"


def test_a_machine_without_gpus_is_its_processor() -> None:
    assert "cores" in machine()
    assert machine().endswith("Linux") or "NVIDIA" in machine()


def test_files_that_this_host_does_not_see_are_refused(
    tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.platform, "node", lambda: "node7")
    weights = tmp_path / "weights"
    weights.symlink_to(__file__)
    require_here(tmp_path, None)
    weights.unlink()
    weights.symlink_to(tmp_path / "hub")
    for path, absent in ((tmp_path, weights), (tmp_path / "policy", tmp_path / "policy")):
        assert refusal(partial(require_here, None, path)) == (
            f"{absent} must be on storage that all hosts of the run share, got 'nothing there on node7'; "
            "give the run another --root, or HF_HOME, policy.model and draft.model other paths"
        )


def _node(labels: dict[str, str]) -> RayNode:
    return RayNode(
        id="n",
        address="10.0.0.1",
        num_cpus=8,
        num_gpus=2,
        free_cpus=8,
        free_gpus=2,
        object_store_bytes=1,
        labels=labels,
    )


def test_labels_say_the_nvlink_domain_and_the_numa_node_of_each_gpu() -> None:
    labels = {NVLINK_LABEL: "rack7", NUMA_LABEL: "0-1", "ray.io/node-id": "n"}
    assert as_cluster([_node(labels)]) == [Node(name="n", num_gpus=2, nvlink_domain="rack7", numa=(0, 1))]
    assert as_cluster([_node({})]) == [Node(name="n", num_gpus=2)]


def test_a_numa_label_that_names_other_gpus_is_refused(refusal: Callable[..., str]) -> None:
    for text in ("0", "0-x", "0-1-1"):
        assert refusal(as_cluster, nodes=[_node({NUMA_LABEL: text})]) == (
            f"label slipstream.io/numa of node 10.0.0.1 must name the NUMA node of each of its 2 GPUs, got {text!r}; "
            "as in 0-0-1-1"
        )
