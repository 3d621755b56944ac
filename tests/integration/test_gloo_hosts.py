"""Weights over gloo between two hosts, and what a cut line between them ends in.

This file is also the sender and both receivers, whom files bring together, as Ray does elsewhere.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from slipstream.refit.config import Channel, RefitConfig, RefitError
from slipstream.refit.stream import GlooGroup, GlooSender, WeightSource, receive
from tests.cluster.hosts import Host, Network, why_not

NUM_RECEIVERS, TIMEOUT_S = 2, 8.0


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
            command = host.command(sys.executable, "-m", "tests.integration.test_gloo_hosts", role, name, value)
            how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen(command, env=dict(host.environment), **how)

        processes = [start(first, "send", first.address)]
        processes += [start(second, "take", str(worker)) for worker in range(NUM_RECEIVERS)]
        try:
            expected = xxhash.xxh3_64()
            for _, tensor in weights():
                expected.update(tensor.numpy().data)
            for worker in range(NUM_RECEIVERS):
                assert read(directory / f"received-{worker}") == [expected.hexdigest(), True]
            assert read(directory / "sent") == expected.hexdigest()

            second.unplug()
            write(directory / "cut", True)
            answer, errors = processes[0].communicate(timeout=60)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    digest, seconds, message = answer.split(" ", 2)
    assert digest == expected.hexdigest(), errors
    assert TIMEOUT_S - 1 <= float(seconds) <= TIMEOUT_S + 4
    assert message.startswith("the gloo channel broke, or stood still for 8 s")


def weights() -> Any:
    """40 MB, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    for index in range(40):
        yield f"w{index}", torch.randn(250_000, generator=generator)


class FileControl:
    """`EngineControl` by files, which all receivers read alike; they know the end by the bytes."""

    num_workers = NUM_RECEIVERS

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def aim(self, *, is_draft: bool) -> None: ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        write(self._directory / "init", init_info)

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None:
        write(self._directory / "update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def write(path: Path, values: Any) -> None:
    """Whole or not at all."""
    path.with_suffix(".part").write_bytes(pickle.dumps(values))
    path.with_suffix(".part").rename(path)


def read(path: Path) -> Any:
    deadline = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return pickle.loads(path.read_bytes())


def send(directory: Path, address: str) -> str:
    """Send once, and once more after the line was cut; return the digest and the error."""
    settings = RefitConfig(channel=Channel.GLOO, bucket_mib=1.0, timeout_s=TIMEOUT_S)
    sender = GlooSender(settings, engines=FileControl(directory), address=address)
    source = WeightSource(weights, model="policy")
    digest = sender.send(source, is_draft=False)
    write(directory / "sent", digest)
    read(directory / "cut")
    start = time.monotonic()
    try:
        sender.send(source, is_draft=False)
    except RefitError as error:
        return f"{digest} {time.monotonic() - start:.1f} {error}"
    return f"{digest} 0 sent over a cut line"


def take(directory: Path, worker: int) -> str:
    """Receive once; tell the digest and whether the tensors are right."""
    group = GlooGroup.join(**read(directory / "init"), worker=worker)
    received: dict[str, torch.Tensor] = {}
    digest = receive(group, received.update, **read(directory / "update"))
    right = all(torch.equal(received[name], tensor) for name, tensor in weights())
    write(directory / f"received-{worker}", [digest, right])
    read(directory / "cut")
    time.sleep(TIMEOUT_S + 4)  # alive, on a host that nobody reaches
    return digest


if __name__ == "__main__":
    role, where, value = sys.argv[1:]
    sys.stdout.write(send(Path(where), value) if role == "send" else take(Path(where), int(value)))
