"""The learner over several hosts computes what it computes on one."""

from __future__ import annotations

from tests.cluster.hosts import Cluster


def test_tensor_parallel_ranks_on_two_hosts_train_as_on_one(cluster: Cluster) -> None:
    first, second = (host.address for host in cluster.hosts[:2])
    alone = cluster.call("runs", "train_two_steps", {"tensor": 2}, [first, first])
    apart = cluster.call("runs", "train_two_steps", {"tensor": 2}, [second, first])

    assert apart["hosts"] == [second, first]
    assert apart["losses"] == alone["losses"]
    assert apart["grad_norms"] == alone["grad_norms"]
    assert len(set(alone["losses"])) == 2
