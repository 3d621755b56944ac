"""One cluster of hosts for all tests; those that harm it come last."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, ray_cluster, why_not

_LOCK = Path(tempfile.gettempdir()) / "slipstream-cluster-tests.lock"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever may not make hosts reads why, and what would help."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = why_not() if here else ""
    items.sort(key=lambda item: item.path == Path(__file__).with_name("test_faults.py"))  # they wear the hosts out
    for item in here:
        item.add_marker(pytest.mark.cluster)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="package")
def one_at_a_time() -> Iterator[None]:
    """Clusters are large: of the processes that run tests here, one has them at a time, and lets go after the last."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="package")
def cluster(one_at_a_time: None) -> Iterator[Cluster]:
    with ray_cluster(3) as cluster:
        yield cluster
