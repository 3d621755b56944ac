"""Channels as a driver holds them, between ends that note what they are asked, and which channel is taken where."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.refit import channel as channel_module
from slipstream.refit.channel import (
    Delivery,
    Location,
    SharedMemoryChannel,
    Snapshot,
    StreamChannel,
    discard_transfers,
    here,
    open_channel,
    resolve,
    send,
    transfer_directory,
)
from slipstream.refit.config import Channel, EngineState, RefitConfig, WeightFiles
from tests.unit.conftest import Refusal
from tests.unit.refusals import rows

STATES = [
    EngineState(policy_version=7, policy_digest="p", draft_version=3, draft_digest="d", num_prefix_cache_resets=1)
]


class Ends:
    """Learner and engines in one, so that the order between them is seen."""

    def __init__(self, places: list[Location] | None = None, *, num_bytes: int = 10, digest: str | None = "p") -> None:
        self.calls: list[Any] = []
        self._places, self._num_bytes, self._digest = places or [here()], num_bytes, digest

    def locations(self) -> list[Location]:
        return self._places

    def weight_bytes(self) -> int:
        return self._num_bytes

    def start_publish(self, directory: Path, version: int, *, is_draft: bool = False) -> Callable[[], Snapshot]:
        self.calls.append(("publish draft" if is_draft else "publish", directory, version))
        model = "draft" if is_draft else "policy"
        return lambda: Snapshot(path=f"{model} {version}", version=version, digest=model[0])

    def start_refit(self, weights: WeightFiles) -> Callable[[], list[EngineState]]:
        self.calls.append(("refit", weights.policy, weights.policy_version, weights.draft, weights.draft_version))

        def wait() -> list[EngineState]:
            self.calls.append("taken")
            return STATES

        return wait

    def control(self, channel: Channel, *, timeout_s: float) -> Any:
        return "control", channel, timeout_s

    def open_stream(self, settings: RefitConfig, engines: Any) -> None:
        self.calls.append(("open", settings, engines))

    def stream(self, *, is_draft: bool, timeout_s: float) -> str | None:
        self.calls.append(("stream", is_draft, timeout_s))
        return "d" if is_draft else self._digest

    def close_stream(self) -> None:
        self.calls.append("close")

    def start_adopt(self, *, policy_version: int, draft_version: int | None) -> Callable[[], list[EngineState]]:
        self.calls.append(("adopt", policy_version, draft_version))
        return lambda: STATES


def shared(directory: Path) -> tuple[Any, SharedMemoryChannel]:
    ends: Any = Ends()
    return ends, SharedMemoryChannel(ends, ends, directory)


def test_shared_memory_writes_and_has_the_engines_read_the_policy_alone_or_with_a_draft(tmp_path: Path) -> None:
    ends, channel = shared(tmp_path)
    assert send(channel, 7) == Delivery(states=STATES, digest="p", origin="policy 7")
    assert ends.calls == [("publish", tmp_path, 7), ("refit", Path("policy 7"), 7, None, 0), "taken"]
    ends.calls.clear()
    assert send(channel, 7, draft_version=3).draft_digest == "d"
    assert ends.calls == [
        *[("publish", tmp_path, 7), ("publish draft", tmp_path, 3)],
        *[("refit", Path("policy 7"), 7, Path("draft 3"), 3), "taken"],
    ]
    ends.calls.clear()
    channel.engines_changed()
    assert ends.calls == []  # whoever is told where the file is reads it


def test_shared_memory_delivers_a_version_and_its_draft_as_often_as_it_is_asked_to(tmp_path: Path) -> None:
    """Though the learner has written later ones; and nobody waits before he asks for an answer."""
    ends, channel = shared(tmp_path)
    versions = ((7, 3), (8, None), (9, 4))
    first, second, third = (channel.start_export(policy, draft_version=draft)() for policy, draft in versions)
    ends.calls.clear()
    to_do = ((first, 3), (first, None), (second, 3), (third, 4))
    waits = [channel.start_delivery(exported, draft_version=draft) for exported, draft in to_do]
    assert ends.calls == [
        ("refit", Path("policy 7"), 7, Path("draft 3"), 3),
        ("refit", Path("policy 7"), 7, None, 0),
        ("refit", Path("policy 8"), 8, Path("draft 3"), 3),
        ("refit", Path("policy 9"), 9, Path("draft 4"), 4),
    ]
    assert [wait().draft_digest for wait in waits] == ["d", None, "d", "d"]
    assert channel.keeps_weights and channel.takes_digest


@pytest.mark.parametrize("channel", [Channel.GLOO, Channel.NCCL, Channel.IPC])
def test_a_stream_is_opened_once_adopted_when_whole_and_joined_by_new_engines(channel: Channel) -> None:
    ends: Any = Ends(digest=None if channel is not Channel.GLOO else "p")
    settings = RefitConfig(channel=channel, bucket_mib=1.0, timeout_s=5.0)
    stream = StreamChannel(ends, ends, settings)
    assert (stream.keeps_weights, stream.takes_digest) == (False, channel is Channel.GLOO)
    delivery = send(stream, 7)
    send(stream, 8, draft_version=3)
    stream.engines_changed()
    opened = ("open", settings, ("control", channel, 5.0))
    assert ends.calls == [
        *[opened, ("stream", False, 5.0), ("adopt", 7, None)],
        *[("stream", False, 5.0), ("stream", True, 5.0), ("adopt", 8, 3), opened],
    ]
    assert (delivery.digest, delivery.draft_digest) == ("p" if channel is Channel.GLOO else None, None)
    assert delivery.origin == f"the {channel.value} channel"


def test_auto_is_shared_memory_in_a_passing_directory_on_one_host_and_gloo_that_is_closed_on_several() -> None:
    ends: Any = Ends()
    with open_channel(RefitConfig(), ends, ends) as channel:
        send(channel, 0)
        directory = ends.calls[0][1]
        assert directory.is_dir()
    assert not directory.exists()
    ends = Ends([here(), place("b")])
    with open_channel(RefitConfig(), ends, ends) as channel:
        send(channel, 0)
    assert [call[0] for call in ends.calls] == ["open", "stream", "adopt", "c"]


def place(host: str, gpu: str | None = None, memory: str | None = None) -> Location:
    return Location(host=host, memory=memory or host, gpu=gpu)


def places(driver: str, learner: str, engines: str) -> dict[str, Any]:
    """Where each of them is: `host`, or `host:gpu`, of several ranks and engines."""
    at = {"driver": driver, "learner": learner, "engines": engines}
    of = {role: [place(*each.split(":")) for each in words.split()] for role, words in at.items()}
    return {**of, "driver": of["driver"][0]}


ONE_CPU = places("a", "a a", "a a a")
TWO_CPUS = places("a", "a", "a b")
DRIVER_AWAY = places("head", "a", "a")
# two containers of one host: the same name, each with a memory of its own
CONTAINERS = places("a", "a", "a") | {"engines": [place("a", memory="other")]}
COLOCATED = places("a", "a:g0 a:g1", "a:g0 a:g1")
MORE_RANKS = places("a", "a:g0 b:g1", "b:g1")
SPLIT = places("a", "a:g0", "b:g1 b:g2")
HALF_SHARED = places("a", "a:g0", "a:g0 a:g1")
MIXED = places("a", "a:g0", "b")


@pytest.mark.parametrize(
    ("found", "channel"),
    [
        (ONE_CPU, Channel.SHARED_MEMORY),
        (places("a", "a b", "a"), Channel.SHARED_MEMORY),  # only the sender of a learner needs it
        (TWO_CPUS, Channel.GLOO),
        (DRIVER_AWAY, Channel.GLOO),
        (CONTAINERS, Channel.GLOO),
        (COLOCATED, Channel.IPC),
        (MORE_RANKS, Channel.IPC),
        (SPLIT, Channel.NCCL),
        (HALF_SHARED, Channel.SHARED_MEMORY),  # neither of vLLM's: an engine without a rank, a rank beside an engine
        (MIXED, Channel.GLOO),
    ],
)
def test_auto_takes_the_fastest_that_the_places_allow(found: dict[str, Any], channel: Channel) -> None:
    assert resolve(Channel.AUTO, **found) is channel
    assert resolve(channel, **found) is channel


def test_gloo_may_be_asked_for_anywhere_and_shared_memory_between_gpus_of_one_host() -> None:
    for found in (ONE_CPU, TWO_CPUS, COLOCATED, SPLIT, MIXED, HALF_SHARED):
        assert resolve(Channel.GLOO, **found) is Channel.GLOO
    assert resolve(Channel.SHARED_MEMORY, **COLOCATED) is Channel.SHARED_MEMORY


RULED_OUT = {"one CPU": ONE_CPU, "two CPUs": TWO_CPUS, "a driver away": DRIVER_AWAY, "a shared GPU": COLOCATED}
RULED_OUT |= {"a GPU for one of two engines": HALF_SHARED, "a GPU and a CPU": MIXED}


@rows(
    """
shared_memory: two CPUs
    refit.channel must cross hosts or containers: driver, learner rank 0 and engines share no memory (a, b), got
    'shared_memory'; set auto, or gloo
shared_memory: a driver away
    refit.channel must cross hosts or containers: driver, learner rank 0 and engines share no memory (a, head), got
    'shared_memory'; set auto, or gloo
nccl: one CPU
    refit.channel must do without CUDA: learner or engines compute on the CPU of a, got 'nccl'; set auto
ipc: a GPU and a CPU
    refit.channel must do without CUDA: learner or engines compute on the CPU of b, got 'ipc'; set auto
nccl: a shared GPU
    refit.channel must not join two processes on one GPU: learner rank 0 shares its GPU with an engine, got 'nccl'; set
    ipc
ipc: a GPU for one of two engines
    refit.channel must find a learner rank on every engine's GPU: 1 of 2 have none, got 'ipc'; set nccl
"""
)
def test_a_channel_that_the_places_rule_out_is_refused(refusal: Refusal, given: str, expected: str) -> None:
    channel, found = given.split(": ")
    assert refusal(lambda: resolve(Channel(channel), **RULED_OUT[found])) == expected


def test_a_bucket_is_given_in_mebibytes_and_never_empty() -> None:
    sizes = [RefitConfig().bucket_bytes, *(RefitConfig(bucket_mib=mib).bucket_bytes for mib in (0.5, 1e-9))]
    assert sizes == [268_435_456, 524_288, 1]


def test_a_place_names_the_file_system_that_processes_share_and_not_the_host() -> None:
    found = here("g0")
    assert found == here("g0")
    assert (found.gpu, here().gpu) == ("g0", None)
    if Path("/dev/shm").is_dir():
        assert found.memory.endswith(f"/{os.stat('/dev/shm').st_dev}")


def test_a_file_system_without_room_for_two_snapshots_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    ends: Any = Ends(num_bytes=free)
    with pytest.raises(ConfigError) as caught:
        SharedMemoryChannel(ends, ends, tmp_path)
    needed, rest = str(caught.value).split(" bytes for ")
    assert needed == f"refit.channel shared_memory needs {2 * free:,}"
    assert rest.startswith(f"2 snapshots of the weights in {tmp_path.parent}, got '")
    assert rest.endswith(
        "bytes free'; mount a larger /dev/shm (a pod has 64 MiB unless it says otherwise), or set gloo, which needs "
        "no files"
    )
    assert ends.calls == []


def test_a_host_without_such_a_file_system_takes_its_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_SHARED_MEMORY", Path("/nowhere"))
    directory = transfer_directory()
    directory.rmdir()
    assert directory.parent == Path(tempfile.gettempdir())


def test_fresh_directories_that_a_killed_process_left_in_memory_are_discarded_and_nothing_else(tmp_path: Path) -> None:
    """The directory's name contains the id of the process that made it."""
    ours, fresh = transfer_directory(), transfer_directory()
    assert ours != fresh
    assert ours.parent == Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    (ours / "policy-0.safetensors").write_bytes(b"weights")
    others = Path(tempfile.mkdtemp(prefix="slipstream-refit-1-", dir=ours.parent))
    try:
        discard_transfers(os.getpid())
        assert not ours.exists() and not fresh.exists()
        assert others.is_dir()
        discard_transfers(os.getpid())  # nothing is left, and nothing is wrong
    finally:
        shutil.rmtree(others)
