"""Pod specs by what a profile says, beyond what the shipped profiles show (tests/unit/workflows/test_pods.py)."""

from dataclasses import replace
from typing import Any

import pytest
from kubernetes.client import ApiClient

from slipstream.kubernetes import pods
from slipstream.kubernetes.profile import Queue, Scheduler, read_profile

GB200 = read_profile("gb200")


def plain(spec: Any) -> Any:
    return ApiClient().sanitize_for_serialization(spec)


@pytest.mark.parametrize("make", [pods.cpu_pod, pods.ray_base, pods.head_overlay, pods.worker_overlay])
def test_every_call_makes_a_pod_of_its_own(make: Any) -> None:
    changed, untouched = make(GB200), make(GB200)
    before = plain(untouched)
    changed.containers[0].resources.limits["cpu"] = "0"
    changed.containers[0].volume_mounts = changed.volumes = []
    assert plain(untouched) == before == plain(make(GB200))


def test_a_cluster_with_rdma_asks_for_it_on_workers_alone() -> None:
    assert GB200.gpu is not None
    profile = replace(GB200, gpu=replace(GB200.gpu, rdma_resources={"rdma/ib": 4}))
    (worker,) = plain(pods.worker_overlay(profile))["containers"]
    assert worker["resources"]["limits"]["rdma/ib"] == worker["resources"]["requests"]["rdma/ib"] == "4"
    for spec in (pods.ray_base(profile), pods.head_overlay(profile)):
        assert "rdma/ib" not in plain(spec)["containers"][0]["resources"]["limits"]


def test_a_queue_that_knows_the_topology_is_asked_for_one_clique_and_no_queue_has_no_label() -> None:
    assert pods.worker_annotations(GB200) == {}
    queue = Queue(scheduler=Scheduler.KUEUE, name="q", knows_topology=True)
    near = {"kueue.x-k8s.io/podset-required-topology": "nvidia.com/gpu.clique"}
    assert pods.worker_annotations(replace(GB200, queue=queue)) == near
    none = replace(GB200, queue=None)
    assert pods.queue_labels(none) == pods.worker_annotations(none) == {}


def test_pods_with_an_identity_of_their_own_get_no_secret() -> None:
    tracking, store = GB200.tracking, GB200.object_store
    assert tracking is not None and store is not None
    sections = {"tracking": replace(tracking, secret=None), "object_store": replace(store, secret=None)}
    assert "envFrom" not in plain(pods.cpu_pod(replace(GB200, **sections)))["containers"][0]


def test_labels_of_the_nodes_are_asked_for_by_every_pod() -> None:
    profile = replace(GB200, labels={"pool": "rl"})
    assert plain(pods.cpu_pod(profile))["nodeSelector"] == {"pool": "rl"}
    assert plain(pods.ray_base(profile))["nodeSelector"] == {"pool": "rl", "kubernetes.io/arch": "arm64"}


def test_a_profile_in_a_config_map_replaces_the_images_file() -> None:
    spec = plain(pods.cpu_pod(replace(read_profile("cpu"), config_map="slipstream-profile")))
    (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "profile"]
    assert (mount["mountPath"], mount["subPath"]) == ("/root/configs/clusters/cpu.yaml", "cpu.yaml")
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert volumes["profile"]["configMap"]["name"] == "slipstream-profile"
