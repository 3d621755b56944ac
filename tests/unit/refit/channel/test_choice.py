"""Which channel is taken where: worked by hand for each arrangement of learner, engines and driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.config import ConfigError
from slipstream.refit.channel.choice import Location, here, resolve
from slipstream.refit.config import Channel


def place(host: str, gpu: str | None = None, memory: str | None = None) -> Location:
    return Location(host=host, memory=memory or host, gpu=gpu)


DRIVER = place("a")
ONE_CPU = {"driver": DRIVER, "learner": [place("a"), place("a")], "engines": [place("a")] * 3}
TWO_CPUS = {"driver": DRIVER, "learner": [place("a")], "engines": [place("a"), place("b")]}
DRIVER_AWAY = {"driver": place("head"), "learner": [place("a")], "engines": [place("a")]}
# two containers of one host: the same name, each with a memory of its own
CONTAINERS = {"driver": DRIVER, "learner": [place("a")], "engines": [place("a", memory="other")]}
COLOCATED = {
    "driver": DRIVER,
    "learner": [place("a", "g0"), place("a", "g1")],
    "engines": [place("a", "g0"), place("a", "g1")],
}
MORE_RANKS = {"driver": DRIVER, "learner": [place("a", "g0"), place("b", "g1")], "engines": [place("b", "g1")]}
SPLIT = {"driver": DRIVER, "learner": [place("a", "g0")], "engines": [place("b", "g1"), place("b", "g2")]}
HALF_SHARED = {"driver": DRIVER, "learner": [place("a", "g0")], "engines": [place("a", "g0"), place("a", "g1")]}
MIXED = {"driver": DRIVER, "learner": [place("a", "g0")], "engines": [place("b")]}


@pytest.mark.parametrize(
    ("places", "channel"),
    [
        (ONE_CPU, Channel.SHARED_MEMORY),
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
def test_auto_takes_the_fastest_that_the_places_allow(places: dict, channel: Channel) -> None:
    assert resolve(Channel.AUTO, **places) is channel
    assert resolve(channel, **places) is channel


@pytest.mark.parametrize("places", [ONE_CPU, TWO_CPUS, COLOCATED, SPLIT, MIXED, HALF_SHARED])
def test_gloo_may_be_asked_for_anywhere(places: dict) -> None:
    assert resolve(Channel.GLOO, **places) is Channel.GLOO


def test_shared_memory_may_be_asked_for_between_gpus_of_one_host() -> None:
    assert resolve(Channel.SHARED_MEMORY, **COLOCATED) is Channel.SHARED_MEMORY


@pytest.mark.parametrize(
    ("channel", "places", "message"),
    [
        (
            Channel.SHARED_MEMORY,
            TWO_CPUS,
            "refit.channel must cross hosts or containers: driver, learner rank 0 and engines share no memory (a, b), "
            "got 'shared_memory'; set auto, or gloo",
        ),
        (
            Channel.SHARED_MEMORY,
            DRIVER_AWAY,
            "refit.channel must cross hosts or containers: driver, learner rank 0 and engines share no memory "
            "(a, head), got 'shared_memory'; set auto, or gloo",
        ),
        (
            Channel.NCCL,
            ONE_CPU,
            "refit.channel must do without CUDA: learner or engines compute on the CPU of a, got 'nccl'; set auto",
        ),
        (
            Channel.IPC,
            MIXED,
            "refit.channel must do without CUDA: learner or engines compute on the CPU of b, got 'ipc'; set auto",
        ),
        (
            Channel.NCCL,
            COLOCATED,
            "refit.channel must not join two processes on one GPU: learner rank 0 shares its GPU with an engine, "
            "got 'nccl'; set ipc",
        ),
        (
            Channel.IPC,
            HALF_SHARED,
            "refit.channel must find a learner rank on every engine's GPU: 1 of 2 have none, got 'ipc'; set nccl",
        ),
    ],
)
def test_a_channel_that_the_places_rule_out_is_refused(channel: Channel, places: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(channel, **places)
    assert str(caught.value) == message


def test_only_the_sender_of_a_learner_needs_the_shared_memory() -> None:
    ranks = [place("a"), place("b")]
    assert resolve(Channel.AUTO, driver=DRIVER, learner=ranks, engines=[place("a")]) is Channel.SHARED_MEMORY


def test_a_place_names_the_file_system_that_processes_share_and_not_the_host() -> None:
    found = here("g0")
    assert found == here("g0")
    assert (found.gpu, here().gpu) == ("g0", None)
    if Path("/dev/shm").is_dir():
        assert found.memory.endswith(f"/{os.stat('/dev/shm').st_dev}")
