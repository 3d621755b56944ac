"""The learner over several hosts computes what it computes on one."""

from __future__ import annotations

from tests.cluster.hosts import Cluster


def test_tensor_parallel_ranks_on_two_hosts_train_as_on_one(cluster: Cluster) -> None:
    """The policy lies on the first host alone: the second one gets a copy."""
    first, second = (host.address for host in cluster.hosts[:2])
    layouts = [({"tensor": 2}, [first, first]), ({"tensor": 2}, [second, first])]

    alone, apart = cluster.call("runs", "train_two_steps", layouts)

    assert apart["hosts"] == [second, first]
    assert apart["losses"] == alone["losses"]
    assert apart["grad_norms"] == alone["grad_norms"]
    assert len(set(alone["losses"])) == 2
