"""Which channel fits where the learner and the engines run: a pure function of their places."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config import require
from slipstream.refit.config import Channel

_SHARED_MEMORY = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where a process of a run computes."""

    host: str  # for people
    memory: str  # equal where two processes see the same files in memory: neither host names nor addresses tell
    gpu: str | None = None  # the device's own id, whatever a mask calls it; None on a CPU


def here(gpu: str | None = None) -> Location:
    """Where this process is."""
    host = socket.gethostname()
    if not (_SHARED_MEMORY.is_dir() and _BOOT.is_file()):
        return Location(host=host, memory=host, gpu=gpu)
    # A container, or a host made of namespaces, has a file system of its own there: its device number says so.
    return Location(host=host, memory=f"{_BOOT.read_text().strip()}/{os.stat(_SHARED_MEMORY).st_dev}", gpu=gpu)


def resolve(wanted: Channel, *, driver: Location, learner: Sequence[Location], engines: Sequence[Location]) -> Channel:
    """The channel to take; `auto` takes the fastest that the hosts can do.

    Args:
        driver: of the process that holds the transfer directory.
        learner: of each rank, rank 0 first: it sends.
        engines: of each worker of each engine.
    Raises:
        ConfigError: the hosts cannot do the channel asked for.
    """
    if wanted is Channel.AUTO:
        return _best(driver, learner, engines)
    problem, fix = _obstacle(wanted, driver, learner, engines)
    require(not problem, "refit.channel", problem, wanted.value, fix)
    return wanted


def _best(driver: Location, learner: Sequence[Location], engines: Sequence[Location]) -> Channel:
    for channel in (Channel.IPC, Channel.NCCL, Channel.SHARED_MEMORY):
        if not _obstacle(channel, driver, learner, engines)[0]:
            return channel
    return Channel.GLOO


def _obstacle(
    channel: Channel, driver: Location, learner: Sequence[Location], engines: Sequence[Location]
) -> tuple[str, str]:
    """The rule that the places break, and what to set instead; empty if there is none."""
    cpus = sorted({place.host for place in (*learner, *engines) if place.gpu is None})
    trained, served = {place.gpu for place in learner}, {place.gpu for place in engines}
    match channel:
        case Channel.SHARED_MEMORY:
            hosts = [driver, learner[0], *engines]
            if len({place.memory for place in hosts}) > 1:
                names = ", ".join(sorted({place.host for place in hosts}))
                rule = f"must cross hosts or containers: driver, learner rank 0 and engines share no memory ({names})"
                return rule, "set auto, or gloo"
        case Channel.NCCL | Channel.IPC if cpus:
            return f"must do without CUDA: learner or engines compute on the CPU of {', '.join(cpus)}", "set auto"
        case Channel.NCCL if learner[0].gpu in served:
            return "must not join two processes on one GPU: learner rank 0 shares its GPU with an engine", "set ipc"
        case Channel.IPC if not served <= trained:
            alone = len(served - trained)
            return f"must find a learner rank on every engine's GPU: {alone} of {len(served)} have none", "set nccl"
    return "", ""
