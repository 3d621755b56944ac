"""Start of a local Ray, the description of a machine, and Ray's nodes."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.workers import session
from slipstream.workers.calls import Worker, machines
from slipstream.workers.placement.plan import Node

TIMED_OUT = "The current node timed out during startup."


@pytest.mark.parametrize(
    ("num_failures", "message", "error", "said"),
    [
        (2, TIMED_OUT, None, ""),
        (9, TIMED_OUT, TimeoutError, "must start within 30 s, and in 3 attempts it did not"),
        (9, "no such address", Exception, "no such address"),
    ],
    ids=["slow to start", "never starts: another attempt may outlive it", "another error: at once"],
)
def test_a_slow_ray_is_started_again(num_failures: int, message: str, error: type[Exception] | None, said: str) -> None:
    starts: list[int] = []

    def start() -> None:
        starts.append(1)
        if len(starts) <= num_failures:
            raise Exception(message)

    with nullcontext() if error is None else pytest.raises(error, match=said):
        session.start_patiently(start)
    assert len(starts) == (3 if message == TIMED_OUT else 1)


QUIET = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
LOCAL = {"address": "local", "object_store_memory": 200 << 20, "include_dashboard": False}
OWN, CLUSTERS = (None, "", " ", "local"), ("10.0.0.1:6379", "ray://head:10001", "auto")


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        *((address, LOCAL | {"_node_ip_address": "127.0.0.1"}) for address in OWN),
        *((address, {"address": address}) for address in CLUSTERS),
    ],
)
@pytest.mark.parametrize("is_connected", [False, True])  # as in a pod, where Flyte's plugin has connected the process
def test_a_run_connects_to_the_address_or_starts_an_instance_of_its_own_unless_it_is_connected(
    address: str | None, asked: dict[str, Any], is_connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inits: list[dict[str, Any]] = []
    ray = SimpleNamespace(is_initialized=lambda: is_connected, init=lambda **given: inits.append(given))
    monkeypatch.setattr(session, "ray", ray)
    monkeypatch.setattr(session.os, "environ", {} if address is None else {"RAY_ADDRESS": address})
    session.connect()
    assert inits == ([] if is_connected else [asked | QUIET])


def test_what_there_is_more_than_once_is_counted_and_a_host_once_whatever_number_of_engines_it_runs() -> None:
    assert session.counted(["NVIDIA GB200", "NVIDIA GB200", "NVIDIA H200"]) == "2 x NVIDIA GB200; NVIDIA H200"
    assert session.counted([]) == ""
    workers = [Worker(actor=None, name=f"engine {i}", node_id=node, machine="aarch64") for i, node in enumerate("aab")]
    assert machines(workers) == "2 x aarch64"


def test_a_machine_without_gpus_is_its_processor() -> None:
    assert "cores" in session.machine()
    assert session.machine().endswith("Linux") or "NVIDIA" in session.machine()


def test_files_that_this_host_lacks_are_refused(
    tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.platform, "node", lambda: "node7")
    weights = tmp_path / "weights"
    weights.symlink_to(__file__)
    session.require_here(tmp_path, None)
    weights.unlink()
    weights.symlink_to(tmp_path / "hub")
    for path, absent in ((tmp_path, weights), (tmp_path / "policy", tmp_path / "policy")):
        assert refusal(partial(session.require_here, None, path)) == (
            f"{absent} must be on storage that all hosts of the run share, got 'nothing there on node7'; "
            "give the run another --root, or HF_HOME, policy.model and draft.model other paths"
        )


def test_rays_nodes_have_their_labels_nvlink_domain_and_the_numa_node_of_each_gpu(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ray_node(address: str, **labels: str) -> dict[str, Any]:
        resources = {"CPU": 8.0, "GPU": 2.0, "object_store_memory": 1.0}
        own = {"NodeManagerAddress": address, "NodeID": f"n{address[-1]}", "Resources": resources, "Labels": labels}
        return {**own, "Alive": address != "10.0.0.3"}

    labels = {session.NVLINK_LABEL: "rack7", session.NUMA_LABEL: "0-1", "ray.io/node-id": "n"}
    nodes = [ray_node("10.0.0.11"), ray_node("10.0.0.9", **labels), ray_node("10.0.0.3")]
    monkeypatch.setattr(session, "ray", SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr(session, "available_resources_per_node", lambda: {"n9": {"CPU": 3.0, "GPU": 1.0}})
    here, other = map(session.with_numa, session.ray_nodes())
    sizes: dict[str, Any] = {"num_gpus": 2, "num_cpus": 8.0}
    assert here == Node(name="n9", address="10.0.0.9", nvlink_domain="rack7", numa=(0, 1), **sizes)
    assert other == Node(name="n1", address="10.0.0.11", **sizes)
    assert (here.free_cpus, here.free_gpus, here.object_store_bytes, here.labels) == (3.0, 1.0, 1, labels)
    assert (other.free_cpus, other.free_gpus, other.labels) == (0.0, 0.0, {})
    for text in ("0", "0-x", "0-1-1"):
        node = Node(name="n", num_gpus=2, address="10.0.0.1", labels={session.NUMA_LABEL: text})
        assert refusal(session.with_numa, node=node) == (
            f"label slipstream.io/numa of node 10.0.0.1 must name the NUMA node of each of its 2 GPUs, got {text!r}; "
            "as in 0-0-1-1"
        )
