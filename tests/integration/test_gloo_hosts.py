"""Weights over gloo between two hosts made of network namespaces, and what a cut line between them ends in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from tests.integration import gloo_host


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _may_make_hosts() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"slip-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return made


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _may_make_hosts(), reason="network namespaces take root, CAP_SYS_ADMIN and iproute2"),
]


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with one cable between them: 10.78.0.1 and 10.78.0.2."""
    pid = os.getpid()
    names = (f"slip-a-{pid}", f"slip-b-{pid}")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"sa{pid}", "type", "veth", "peer", "name", f"sb{pid}")
        for index, (name, link) in enumerate(zip(names, (f"sa{pid}", f"sb{pid}"), strict=True), start=1):
            _run("ip", "link", "set", link, "netns", name)
            _run("ip", "-n", name, "link", "set", link, "name", "eth0")
            _run("ip", "-n", name, "addr", "add", f"10.78.0.{index}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_weights_cross_hosts_and_a_cut_line_ends_in_an_error(hosts: tuple[str, str], tmp_path: Path) -> None:
    def start(host: str, role: str, value: str) -> subprocess.Popen[str]:
        script = [sys.executable, "-m", "tests.integration.gloo_host", role, str(tmp_path), value]
        root = Path(__file__).parents[2]
        return subprocess.Popen(
            ["ip", "netns", "exec", host, *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )

    first, second = hosts
    processes = [
        start(first, "send", "10.78.0.1"),
        *(start(second, "take", str(worker)) for worker in range(gloo_host.NUM_RECEIVERS)),
    ]
    try:
        expected = xxhash.xxh3_64()
        for _, tensor in gloo_host.weights():
            expected.update(tensor.numpy().data)
        for worker in range(gloo_host.NUM_RECEIVERS):
            assert gloo_host.read(tmp_path / f"received-{worker}") == [expected.hexdigest(), True]
        assert gloo_host.read(tmp_path / "sent") == expected.hexdigest()

        _run("ip", "-n", second, "link", "set", "eth0", "down")
        gloo_host.write(tmp_path / "cut", True)
        answer, errors = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    digest, seconds, message = answer.split(" ", 2)
    assert digest == expected.hexdigest(), errors
    assert gloo_host.TIMEOUT_S - 1 <= float(seconds) <= gloo_host.TIMEOUT_S + 4
    assert message.startswith("the gloo channel broke, or stood still for 8 s")
