"""What fails on a cluster ends in an error that says who, where and when, and a retry ends as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, Host

_DETECTED_S = 30.0  # a dead process at once; a silent host after 3 checks of 3 s each, and Ray's own delays
_ANSWER_S = 8.0
_STEP = r"during train_step of policy version \d \(done before: save_checkpoint\)"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all hosts see: only /tmp and /dev/shm are their own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="slipstream-cluster-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[float]:
    """Losses of a run that nothing disturbs."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="slipstream-cluster-") as directory:
        places = [host.address for host in cluster.hosts[:2]]
        return cluster.call("runs", "train_through_a_fault", directory, places, places, 60.0)["losses"]


def lose(
    cluster: Cluster, shared: Path, victim: Host, harm: Callable[[], None], *, later: list[Host]
) -> tuple[str, float, list[float]]:
    """Train on the first host and on the victim, do harm while a step is under way, and go on elsewhere.

    Returns:
        The error, the seconds until it came, and the losses of the whole run.
    """
    first = cluster.hosts[0]
    places = [first.address, victim.address]
    driver = cluster.start(
        "runs", "train_through_a_fault", str(shared), places, [host.address for host in later], _ANSWER_S
    )
    driver.read("training", timeout_s=120)
    wait_for_a_step(victim)
    start_s = time.monotonic()
    harm()
    error = driver.read("lost", timeout_s=90)
    elapsed_s = time.monotonic() - start_s
    return error, elapsed_s, driver.read("answer", timeout_s=120)["losses"]


def wait_for_a_step(host: Host) -> int:
    """The rank on that host, as soon as it is in a step: Ray shows the running method in a process's title."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        pids = host.pids("LearnerProcess.train_step")
        if pids:
            return pids[0]
    raise AssertionError("no step has begun")


def test_a_killed_rank_is_named_at_once_and_the_retry_ends_equal(
    cluster: Cluster, shared: Path, undisturbed: list[float]
) -> None:
    victim = cluster.hosts[1]

    error, elapsed_s, losses = lose(
        cluster,
        shared,
        victim,
        lambda: os.kill(wait_for_a_step(victim), signal.SIGKILL),
        later=[cluster.hosts[0], victim],
    )

    assert re.match(rf"learner rank 1 on {victim.address} died {_STEP}", error), error
    assert elapsed_s < _DETECTED_S
    assert losses == undisturbed


def test_a_rank_that_hangs_is_named_when_its_deadline_is_over(
    cluster: Cluster, shared: Path, undisturbed: list[float]
) -> None:
    victim, first = cluster.hosts[1], cluster.hosts[0]

    error, elapsed_s, losses = lose(
        cluster,
        shared,
        victim,
        lambda: os.kill(wait_for_a_step(victim), signal.SIGSTOP),
        later=[first, victim],
    )

    expected = (
        rf"learner rank 1 on {victim.address} \(stopped\) did not answer within 8 s \(learner\.answer_timeout_s\) "
        rf"{_STEP}; learner rank 0 on {first.address} waited as well"
    )
    assert re.match(expected, error), error
    assert _ANSWER_S - 2 < elapsed_s < _ANSWER_S + _DETECTED_S
    assert losses == undisturbed


def test_a_full_memory_file_system_is_an_error_and_no_dead_rank(cluster: Cluster) -> None:
    host = cluster.hosts[1]
    host.run("bash", "-c", "head -c 64M /dev/zero > /dev/shm/full || true")
    try:
        error = cluster.call("runs", "publish", host.address)
    finally:
        host.run("rm", "/dev/shm/full")

    assert re.search(r"the weights need [\d,]+ bytes in /dev/shm, which has 0 free", error), error
    assert f"learner rank 0 on {host.address} failed during publish of policy version 3 (done before: load)" in error


def test_a_directory_that_a_rank_does_not_see_is_refused(cluster: Cluster) -> None:
    address = cluster.hosts[1].address

    error = cluster.call("runs", "save_where_others_cannot_see", address)

    assert "must be on storage that all hosts of the learner share" in error
    assert f"no such directory for learner rank 0 on {address}" in error


@pytest.mark.parametrize("harm", ["kill", "unplug", "freeze"])
def test_a_lost_host_is_named_and_the_retry_on_other_hosts_ends_equal(
    cluster: Cluster, shared: Path, undisturbed: list[float], harm: str
) -> None:
    """`freeze` stops every process of the host, which then answers nothing and yet is there."""
    victim = cluster.add()
    harms = {"kill": victim.kill, "unplug": victim.unplug, "freeze": victim.freeze}

    error, elapsed_s, losses = lose(cluster, shared, victim, harms[harm], later=cluster.hosts[:2])
    victim.kill()
    cluster.hosts.remove(victim)

    assert error.startswith(f"learner rank 1 on {victim.address}"), error
    assert re.search(_STEP, error), error
    assert elapsed_s < _ANSWER_S + _DETECTED_S
    assert losses == undisturbed
