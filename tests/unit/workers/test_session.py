"""What a machine is called."""

from __future__ import annotations

from slipstream.workers.calls import Worker, machines
from slipstream.workers.session import counted, machine


def test_what_there_is_more_than_once_is_counted() -> None:
    assert counted(["NVIDIA GB200", "NVIDIA GB200", "NVIDIA H200"]) == "2 x NVIDIA GB200; NVIDIA H200"
    assert counted([]) == ""


def test_hosts_are_counted_once_whatever_number_of_engines_they_run() -> None:
    workers = [Worker(actor=None, name=f"engine {i}", node_id=node, machine="aarch64") for i, node in enumerate("aab")]
    assert machines(workers) == "2 x aarch64"


def test_a_machine_without_gpus_is_its_processor() -> None:
    assert "cores" in machine()
    assert machine().endswith("Linux") or "NVIDIA" in machine()
