"""Weights over gloo between two hosts, and what a cut line between them ends in."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from tests.cluster.hosts import Host, Network, why_not
from tests.integration import gloo_host


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if why_not():
        pytest.skip(why_not())
    with Network() as network:
        yield network.add(), network.add()


@pytest.mark.slow
def test_weights_cross_hosts_and_a_cut_line_ends_in_an_error(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="slipstream-gloo-") as name:  # both hosts see it
        directory = Path(name)

        def start(host: Host, role: str, value: str) -> subprocess.Popen[str]:
            command = host.command(sys.executable, "-m", "tests.integration.gloo_host", role, name, value)
            return subprocess.Popen(
                command, env=dict(host.environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

        takers = [start(second, "take", str(worker)) for worker in range(gloo_host.NUM_RECEIVERS)]
        processes = [start(first, "send", first.address), *takers]
        try:
            expected = xxhash.xxh3_64()
            for _, tensor in gloo_host.weights():
                expected.update(tensor.numpy().data)
            for worker in range(gloo_host.NUM_RECEIVERS):
                assert gloo_host.read(directory / f"received-{worker}") == [expected.hexdigest(), True]
            assert gloo_host.read(directory / "sent") == expected.hexdigest()

            second.unplug()
            gloo_host.write(directory / "cut", True)
            answer, errors = processes[0].communicate(timeout=60)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    digest, seconds, message = answer.split(" ", 2)
    assert digest == expected.hexdigest(), errors
    assert gloo_host.TIMEOUT_S - 1 <= float(seconds) <= gloo_host.TIMEOUT_S + 4
    assert message.startswith("the gloo channel broke, or stood still for 8 s")
