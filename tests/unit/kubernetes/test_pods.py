"""Pod specs by what a profile says, beyond what the shipped profiles show (tests/unit/workflows/test_pods.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kubernetes.client import ApiClient

from slipstream.kubernetes import pods
from slipstream.kubernetes.profile import ClusterProfile, Queue, Scheduler, read_profile


def plain(spec: Any) -> Any:
    return ApiClient().sanitize_for_serialization(spec)


@pytest.fixture
def gb200() -> ClusterProfile:
    return read_profile("gb200")


@pytest.mark.parametrize("make", [pods.cpu_pod, pods.ray_base, pods.head_overlay, pods.worker_overlay])
def test_every_call_makes_a_pod_of_its_own(make: Any, gb200: ClusterProfile) -> None:
    changed, untouched = make(gb200), make(gb200)
    before = plain(untouched)
    changed.containers[0].resources.limits["cpu"] = "0"
    changed.containers[0].volume_mounts = []
    changed.volumes = []
    assert plain(untouched) == before == plain(make(gb200))


def test_a_cluster_with_rdma_asks_for_it_on_workers_alone(gb200: ClusterProfile) -> None:
    assert gb200.gpu is not None
    profile = replace(gb200, gpu=replace(gb200.gpu, rdma_resources={"rdma/ib": 4}))
    (worker,) = plain(pods.worker_overlay(profile))["containers"]
    assert worker["resources"]["limits"]["rdma/ib"] == worker["resources"]["requests"]["rdma/ib"] == "4"
    for spec in (pods.ray_base(profile), pods.head_overlay(profile)):
        assert "rdma/ib" not in plain(spec)["containers"][0]["resources"]["limits"]


def test_a_queue_that_knows_the_topology_is_asked_for_one_clique(gb200: ClusterProfile) -> None:
    assert pods.worker_annotations(gb200) == {}
    queue = Queue(scheduler=Scheduler.KUEUE, name="q", knows_topology=True)
    assert pods.worker_annotations(replace(gb200, queue=queue)) == {
        "kueue.x-k8s.io/podset-required-topology": "nvidia.com/gpu.clique"
    }


def test_without_a_queue_the_job_has_no_label_of_one(gb200: ClusterProfile) -> None:
    profile = replace(gb200, queue=None)
    assert pods.queue_labels(profile) == pods.worker_annotations(profile) == {}


def test_pods_with_an_identity_of_their_own_get_no_secret(gb200: ClusterProfile) -> None:
    assert gb200.tracking is not None and gb200.object_store is not None
    profile = replace(
        gb200, tracking=replace(gb200.tracking, secret=None), object_store=replace(gb200.object_store, secret=None)
    )
    assert "envFrom" not in plain(pods.cpu_pod(profile))["containers"][0]


def test_labels_of_the_nodes_are_asked_for_by_every_pod(gb200: ClusterProfile) -> None:
    profile = replace(gb200, labels={"pool": "rl"})
    assert plain(pods.cpu_pod(profile))["nodeSelector"] == {"pool": "rl"}
    assert plain(pods.ray_base(profile))["nodeSelector"] == {"pool": "rl", "kubernetes.io/arch": "arm64"}


def test_a_profile_in_a_config_map_replaces_the_images_file() -> None:
    profile = replace(read_profile("cpu"), config_map="slipstream-profile")
    (container,) = pods.cpu_pod(profile).containers
    (mount,) = [each for each in container.volume_mounts or [] if each.name == "profile"]
    assert (mount.mount_path, mount.sub_path) == ("/root/configs/clusters/cpu.yaml", "cpu.yaml")
    (volume,) = [each for each in pods.cpu_pod(profile).volumes or [] if each.name == "profile"]
    assert volume.config_map is not None and volume.config_map.name == "slipstream-profile"
