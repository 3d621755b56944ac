"""The learner over several hosts computes what it computes on one."""

from __future__ import annotations

import tempfile

from tests.cluster.hosts import Cluster


def test_tensor_parallel_ranks_on_two_hosts_train_as_on_one(cluster: Cluster) -> None:
    first, second = (host.address for host in cluster.hosts[:2])
    layouts = [({"tensor": 2}, [first, first]), ({"tensor": 2}, [second, first])]

    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="slipstream-cluster-") as directory:  # all hosts see it
        alone, apart = cluster.call("runs", "train_two_steps", directory, layouts)

    assert apart["hosts"] == [second, first]
    assert apart["losses"] == alone["losses"]
    assert apart["grad_norms"] == alone["grad_norms"]
    assert len(set(alone["losses"])) == 2
