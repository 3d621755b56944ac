"""One process of `test_gloo_hosts.py`: the sender, or a receiver; they find each other through files, as over Ray."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from slipstream.refit.config import Channel, RefitConfig, RefitError
from slipstream.refit.stream import GlooGroup, GlooInit, GlooSender, GlooUpdate, WeightSource, receive

NUM_RECEIVERS, NUM_TENSORS, TIMEOUT_S = 2, 40, 8.0


def weights() -> Any:
    """40 MB, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    for index in range(NUM_TENSORS):
        yield f"w{index}", torch.randn(250_000, generator=generator)


class FileControl:
    """`EngineControl` by files: what is sent to whom does not matter here, all receivers do the same."""

    num_workers = NUM_RECEIVERS

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def aim(self, *, is_draft: bool) -> None:
        """There is one model."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Write it where they look."""
        write(self._directory / "init", init_info)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def update_weights(self, update_info: Any) -> None:
        """Write it where they look."""
        write(self._directory / "update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """They know."""


def write(path: Path, values: Any) -> None:
    """Whole or not at all."""
    path.with_suffix(".part").write_text(json.dumps(values))
    path.with_suffix(".part").rename(path)


def read(path: Path) -> Any:
    deadline = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return json.loads(path.read_text())


def send(directory: Path, address: str) -> str:
    """Send once, and once more if the test asks for it; returns the digest or the error."""
    settings = RefitConfig(channel=Channel.GLOO, bucket_mib=1.0, timeout_s=TIMEOUT_S)
    sender = GlooSender(settings, engines=FileControl(directory), address=address)
    source = WeightSource(weights, model="policy")
    digest = sender.send(source, is_draft=False).digest
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
    group = GlooGroup.join(GlooInit(**read(directory / "init")), worker=worker)
    received: dict[str, torch.Tensor] = {}
    update = GlooUpdate.of(read(directory / "update"))
    digest = receive(group, update, lambda tensors: received.update(tensors))
    right = all(torch.equal(received[name], tensor) for name, tensor in weights())
    write(directory / f"received-{worker}", [digest, right])
    read(directory / "cut")
    time.sleep(TIMEOUT_S + 4)  # alive, on a host that nobody reaches
    return digest


if __name__ == "__main__":
    role, where, value = sys.argv[1:]
    sys.stdout.write(send(Path(where), value) if role == "send" else take(Path(where), int(value)))
