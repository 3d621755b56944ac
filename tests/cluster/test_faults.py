"""Faults of a cluster end in errors that say who, where and when, and a retry ends as if nothing had been.

One run goes through five faults, one after another, each in the middle of a step.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, Host, seen_by_all, split_over

_ANSWER_S = 15.0  # for a step of about a second, on a machine that may be busy
_DETECTED_S = 25.0  # Ray asks a silent host three times, 2 s each, and takes its time to tell
_STEP = r"during train_step of policy version \d+ \(done before: save_checkpoint\)"


@dataclass(frozen=True)
class Fault:
    """A fault, the error that it ended in, and the seconds until then."""

    victim: Host
    error: str
    elapsed_s: float


@dataclass(frozen=True)
class Story:
    """The faults by name, and the losses with and without them."""

    first: Host
    faults: dict[str, Fault]
    losses: list[float]
    undisturbed: list[float]


@pytest.fixture(scope="module")
def story(cluster: Cluster) -> Story:
    first, second, third = cluster.hosts[:3]
    fourth, fifth = cluster.add(2)
    harms: dict[str, tuple[Host, Callable[[], None]]] = {
        "killed rank": (second, lambda: os.kill(in_a_step(second), signal.SIGKILL)),
        "hanging rank": (second, lambda: os.kill(in_a_step(second), signal.SIGSTOP)),
        "killed host": (third, third.kill),
        "unplugged host": (fourth, fourth.unplug),
        "hanging host": (fifth, fifth.freeze),
    }
    attempts = [[first.address, victim.address] for victim, _ in harms.values()] + [[first.address, second.address]]
    faults = {}
    with seen_by_all() as directory:
        driver = cluster.start("runs", "train_through_faults", directory, attempts, _ANSWER_S)
        for name, (victim, harm) in harms.items():
            driver.read("training", timeout_s=120)
            in_a_step(victim)
            start_s = time.monotonic()
            harm()
            error = driver.read("lost", timeout_s=120)
            faults[name] = Fault(victim, error, time.monotonic() - start_s)
        losses, undisturbed = driver.read("answer", timeout_s=600)
    return Story(first, faults, losses, undisturbed)


def in_a_step(host: Host) -> int:
    """The rank on that host, as soon as it is in a step: Ray shows the running method in a process's title."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        pids = host.pids("LearnerProcess.train_step")
        if pids:
            return pids[0]
    raise AssertionError("no step has begun")


def test_a_full_memory_file_system_and_a_directory_of_the_drivers_own_are_errors_and_no_dead_rank(
    cluster: Cluster,
) -> None:
    host = cluster.hosts[1]
    with seen_by_all() as directory:
        go_on = Path(directory) / "go_on"
        driver = cluster.start("runs", "write_where_it_must_fail", directory, host.address, str(go_on))
        driver.read("loaded", timeout_s=120)
        host.run("bash", "-c", "head -c 64M /dev/zero > /dev/shm/full || true")
        try:
            go_on.touch()
            full, unseen = driver.read("answer", timeout_s=120)
        finally:
            host.run("rm", "/dev/shm/full")

    rank = f"learner rank 0 on {host.address}"
    assert re.search(r"shared_memory needs [\d,]+ bytes for 2 snapshots of the weights in .*\b0 bytes free", full), full
    assert f"{rank} failed during publish of policy version 3 (done before: load)" in full
    assert "must be on storage that all hosts of the learner share" in unseen
    assert f"no such directory for {rank}" in unseen


def test_a_killed_rank_is_named_at_once(story: Story) -> None:
    fault = story.faults["killed rank"]
    assert re.match(rf"learner rank 1 on {fault.victim.address} died {_STEP}", fault.error), fault
    assert fault.elapsed_s < _DETECTED_S


def test_a_rank_that_hangs_is_told_from_the_one_that_waits_for_it_when_the_deadline_is_over(story: Story) -> None:
    fault = story.faults["hanging rank"]
    expected = (
        rf"learner rank 1 on {fault.victim.address} \(stopped\) did not answer within 15 s "
        rf"\(learner\.answer_timeout_s\) {_STEP}; learner rank 0 on {story.first.address} waited as well"
    )
    assert re.match(expected, fault.error), fault
    assert _ANSWER_S - 5 < fault.elapsed_s < _ANSWER_S + _DETECTED_S


@pytest.mark.parametrize("name", ["killed host", "unplugged host", "hanging host"])
def test_a_lost_host_is_named_with_its_rank(story: Story, name: str) -> None:
    fault = story.faults[name]
    assert fault.error.startswith(f"learner rank 1 on {fault.victim.address}"), fault
    assert re.search(_STEP, fault.error), fault
    assert fault.elapsed_s < _ANSWER_S + _DETECTED_S


def test_after_all_of_them_the_losses_are_those_of_a_run_that_nothing_disturbed(story: Story) -> None:
    assert len(story.undisturbed) > len(story.faults)
    assert story.losses == story.undisturbed


def test_on_reserved_gpus_a_spare_host_takes_the_place_of_one_of_engines_and_of_one_of_the_learner(
    story: Story, cluster: Cluster
) -> None:
    first, second = cluster.hosts[:2]  # those that the faults before this one have left
    generating, *spare = cluster.add(3)
    split = {"learner": {"parallel": {"data": 2}}, "engine": {"num_engines": 1}, **split_over(1)}
    with seen_by_all() as directory:
        driver = cluster.start("arms", "outlive_hosts", directory, split)
        for step, victim in enumerate((generating, second)):
            assert driver.read("done", timeout_s=300) == step
            victim.kill()
            (Path(directory) / str(step)).touch()
        found, undisturbed = driver.read("answer", timeout_s=300)

    assert found["hosts"] == {"learner": [first.address, spare[1].address], "engines": [spare[0].address]}
    assert found["steps"] == undisturbed["steps"]
    assert len(found["steps"]) == 3
    said = "\n".join(found["log"])
    assert re.search(rf"engine 0 on {generating.address} .*; restart 1 of at most 3 in this run", said), said
    assert re.search(rf"learner rank 1 on {second.address} .*; the learner restarts from its last checkpoint", said)
