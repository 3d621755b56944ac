"""The sender of `test_gloo_hosts.py`, or a receiver; files bring them together, as Ray does elsewhere."""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch

from slipstream.refit.config import Channel, RefitConfig, RefitError
from slipstream.refit.stream import GlooGroup, GlooSender, WeightSource, receive

NUM_RECEIVERS, NUM_TENSORS, TIMEOUT_S = 2, 40, 8.0


def weights() -> Any:
    """40 MB, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    for index in range(NUM_TENSORS):
        yield f"w{index}", torch.randn(250_000, generator=generator)


class FileControl:
    """`EngineControl` by files, which all receivers read alike."""

    num_workers = NUM_RECEIVERS

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def aim(self, *, is_draft: bool) -> None:
        """There is one model."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Write the address for the receivers."""
        write(self._directory / "init", init_info)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def update_weights(self, update_info: Any) -> None:
        """Write the announcement for the receivers."""
        write(self._directory / "update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: a receiver knows the end by the bytes."""


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
    """Send once, and once more after the line was cut; return the digest or the error."""
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
    """Receive once; returns the digest and whether the tensors are right."""
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
