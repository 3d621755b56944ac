"""A run on a machine where another Ray lives, or has left its address behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_RAY = Path(sys.executable).with_name("ray")
_CURRENT = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` leaves its address, and Ray looks for a cluster; `ray.init` reads no other place."""

_RUN = """
from slipstream.workers.session import connect
import ray

connect()
print(ray.get_runtime_context().gcs_address, int(ray.cluster_resources().get("beside", 0)))
"""
_DEAD = "127.0.0.1:1"


@pytest.fixture
def current() -> Iterator[Path]:
    """The file with the address; it is afterwards what it was."""
    before = _CURRENT.read_bytes() if _CURRENT.is_file() else None
    _CURRENT.parent.mkdir(parents=True, exist_ok=True)
    yield _CURRENT
    _CURRENT.unlink(missing_ok=True) if before is None else _CURRENT.write_bytes(before)


def _run(address: str | None = None) -> list[str]:
    """The address that a process connects to, and whether it is that of the other Ray."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {} if address is None else {"RAY_ADDRESS": address}
    run = subprocess.run([sys.executable, "-c", _RUN], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_an_address_that_a_dead_ray_left_changes_nothing(current: Path) -> None:
    current.write_text(_DEAD)
    address, is_other = _run()
    assert address != _DEAD and is_other == "0"


def test_a_ray_that_runs_beside_is_taken_only_by_name(current: Path) -> None:
    current.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    head = subprocess.Popen(
        [
            *(_RAY, "start", "--head", "--block", f"--port={port}", "--include-dashboard=false", "--num-cpus=1"),
            *("--object-store-memory=100000000", "--resources", '{"beside": 1}', "--disable-usage-stats"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    try:
        address = _address_of(head)
        assert address.endswith(f":{port}")
        own, is_other = _run()
        assert own != address and is_other == "0"
        assert _run(address) == [address, "1"]
    finally:
        head.terminate()  # with all that it started
        head.wait(60)


def _address_of(head: subprocess.Popen[bytes]) -> str:
    """Waits until it has left its address."""
    deadline = time.monotonic() + 60
    while not _CURRENT.is_file():
        assert head.poll() is None, "ray start ended"
        assert time.monotonic() < deadline, "ray start must leave its address within a minute"
        time.sleep(0.2)
    return _CURRENT.read_text().strip()
