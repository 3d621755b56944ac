"""Cluster profiles are read strictly, those that are shipped hold together, and what does not fit is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.config import merge
from slipstream.kubernetes.pods import SUBMITTER
from slipstream.kubernetes.profile import (
    ClusterProfile,
    active_profile,
    read_profile,
    require_fits,
    shared_root,
)
from slipstream.recipe import load_recipe
from slipstream.types import Workload

Refusal = Callable[..., str]
SOUND: dict[str, Any] = {
    "name": "mine",
    "run_root": "/mnt/runs",
    "cpu": {"cpus": 2, "memory_gib": 8},
    "head": {"cpus": 4, "memory_gib": 16},
    "gpu": {
        "nodes": 2,
        "gpus_per_node": 4,
        "product": "NVIDIA-GB200",
        "architecture": "arm64",
        "pod": {"cpus": 64, "memory_gib": 400, "shared_memory_gib": 100},
    },
    "storage": {"claim": "runs", "mount_path": "/mnt"},
    "ray_token_secret": "ray",
}


def shared_memory(gib: int) -> dict[str, Any]:
    return {"gpu": {"pod": {"shared_memory_gib": gib}}}


def read(directory: Path, changes: dict[str, Any]) -> ClusterProfile:
    """Read the profile SOUND with `changes`; `None` leaves a section out."""
    values = {key: value for key, value in merge(SOUND, changes).items() if value is not None}
    path = directory / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return read_profile(str(path))


NO_SHARED_MEMORY = "weights, NCCL and Ray's object store lie in /dev/shm, and a pod has 64 MiB there by itself"
NO_TOKEN = "name a secret with the key auth_token: without it anybody in the network may run code"
KUBERNETES_NAME = "must be a name of Kubernetes: lower-case letters, digits, '-' and '.'"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": {"clique": "x"}}, "unknown key 'gpu.clique'; did you mean 'gpu.clique_label'?"),
        ({"gpu": {"gpus_per_node": 0}}, "gpu.gpus_per_node must be >= 1, got 0; leave gpu out"),
        (
            {"gpu": {"rdma_resources": {"rdma/ib": 0}}},
            "gpu.rdma_resources must read vendor/name: count >= 1, got {'rdma/ib': 0}; as in rdma/ib: 4",
        ),
        (shared_memory(0), f"gpu.pod.shared_memory_gib must be >= 1, got 0; {NO_SHARED_MEMORY}"),
        (shared_memory(400), "gpu.pod.shared_memory_gib must be < memory_gib 400, of which it is a part, got 400"),
        ({"head": None}, "head is required with gpu, got None; Ray's head runs the task's process"),
        ({"ray_token_secret": None}, f"ray_token_secret is required with gpu, got None; {NO_TOKEN}"),
        (
            {"run_root": "/data/runs"},
            "run_root must lie below storage.mount_path /mnt, got '/data/runs'; pods share nothing else",
        ),
        ({"storage": {"mount_path": "mnt"}}, "storage.mount_path must be an absolute path below /, got 'mnt'"),
        ({"storage": {"claim": "My_Claim"}}, f"storage.claim {KUBERNETES_NAME}, got 'My_Claim'"),
        (
            {"tracking": {"uri": "sqlite:///mlflow.db"}},
            "tracking.uri must be http:// or https://, got 'sqlite:///mlflow.db'; pods share no SQLite file",
        ),
        (
            {"object_store": {"prefix": "/data"}},
            "object_store.prefix must start with one of s3://, gs://, abfs://, got '/data'",
        ),
        (
            {"queue": {"scheduler": "volcano", "name": "q", "knows_topology": True}},
            "queue.knows_topology must be false with volcano, got True",
        ),
        (
            {"schedules": {"slack": ["#runs"]}},
            "schedules.slack must hold e-mail addresses, got ['#runs']; Slack shows a channel's",
        ),
        ({"name": "other"}, "name must be the file's name 'mine', got 'other'"),
    ],
)
def test_an_unsound_profile_is_refused_by_file_and_field(
    refusal: Refusal, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    said = refusal(read, directory=tmp_path, changes=changes)
    assert said == f"cluster profile {tmp_path / 'mine.yaml'}: {message}"


def test_a_profile_that_is_unknown_empty_or_has_no_shared_volume_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.touch()
    said = refusal(read_profile, name=str(path))
    assert said.startswith(f"cluster profile {path} must hold a mapping of field to value, got 'an em")
    said = refusal(read, directory=tmp_path, changes={"storage": None})
    assert said.startswith(f"cluster profile {path}: gpu must be left out without storage, got GpuNodes(")
    assert said.endswith("; pods need a shared volume")
    assert refusal(read_profile, name="gb2000") == (
        "SLIPSTREAM_CLUSTER must name a cluster profile, got 'gb2000'; known profiles: cpu, gb200, h200, local"
    )


def test_the_profile_is_local_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_CLUSTER", raising=False)
    assert active_profile().name == "local"
    assert active_profile().is_local
    monkeypatch.setenv("SLIPSTREAM_CLUSTER", "gb200")
    assert active_profile().name == "gb200"


@pytest.mark.parametrize("name", ["gb200", "h200"])
@pytest.mark.parametrize("workload", list(Workload))
def test_the_8b_recipe_of_a_profile_fits_its_nodes(name: str, workload: Workload) -> None:
    profile = read_profile(name)
    recipe = load_recipe(profile.recipe_8b, workload=workload)
    sizes = {"nodes": recipe.placement.nodes, "gpus_per_node": recipe.placement.gpus_per_node}
    require_fits(profile, **sizes, trains_from_scratch=recipe.policy.scratch is not None)


NO_URI, BELOW = "be a path, not a URI", "lie below /mnt/slipstream, the shared volume of cluster gb200"


@pytest.mark.parametrize(
    ("root", "cluster", "is_local", "rule"),
    [
        ("runs", "local", True, ""),
        ("runs", "gb200", False, "be absolute in pods"),
        ("s3://bucket/runs", "gb200", True, NO_URI),
        ("s3://bucket/runs", "gb200", False, NO_URI),
        *((root, "gb200", False, BELOW) for root in ("/tmp/runs", "/mnt/slipstream/../runs", "/mnt/slipstream2")),
        ("/mnt/slipstream/team/runs", "gb200", False, ""),
        ("/data/runs", "local", False, ""),  # tasks in processes of their own share this machine
    ],
)
def test_a_root_is_a_path_that_all_tasks_share(
    refusal: Refusal, root: str, cluster: str, is_local: bool, rule: str
) -> None:
    share = partial(shared_root, root, read_profile(cluster), is_local=is_local)
    if rule:
        assert refusal(share) == f"run_root must {rule}, got {root!r}; as in /mnt/slipstream/runs"
    else:
        assert share() == Path(root)


ONE_TO_FOUR = "placement.gpus_per_node must be 1 to 4 on cluster gb200, got"


@pytest.mark.parametrize(
    ("cluster", "recipe", "message"),
    [
        ("gb200", {"nodes": 9}, "placement.nodes must be <= 8, the nodes of cluster gb200, got 9; override it with"),
        ("gb200", {"gpus_per_node": 8}, f"{ONE_TO_FOUR} 8"),
        ("gb200", {"gpus_per_node": 0}, f"{ONE_TO_FOUR} 0; register for a cluster without GPUs"),
        ("gb200", {"trains_from_scratch": True}, "policy.model must name a model on cluster gb200, where prepare_poli"),
        ("cpu", {}, "placement.gpus_per_node must be 0 on cluster cpu, got 4; register for a cluster with GPUs"),
    ],
)
def test_a_recipe_that_the_cluster_cannot_hold_is_refused(
    refusal: Refusal, cluster: str, recipe: dict[str, Any], message: str
) -> None:
    asked = {"nodes": 8, "gpus_per_node": 4, "trains_from_scratch": False} | recipe
    assert refusal(require_fits, profile=read_profile(cluster), **asked).startswith(message)


def test_a_recipe_may_take_less_than_the_cluster_has() -> None:
    require_fits(read_profile("gb200"), nodes=1, gpus_per_node=1, trains_from_scratch=False)
    require_fits(read_profile("cpu"), nodes=1, gpus_per_node=0, trains_from_scratch=True)


CAPACITY = {"gb200": (144, 894), "h200": (192, 1862)}
"""Cores and GiB of a node: a GB200 tray has 2 Grace processors of 72 cores with 480 GB each, an H200 host 2 TB."""


@pytest.mark.parametrize("name", sorted(CAPACITY))
def test_worker_head_and_submitter_fit_on_one_node_and_leave_a_tenth_to_the_system(name: str) -> None:
    profile, (cpus, memory_gib) = read_profile(name), CAPACITY[name]
    assert profile.gpu is not None and profile.head is not None
    sizes = (profile.gpu.pod, profile.head, SUBMITTER)
    assert sum(size.cpus for size in sizes) <= 0.9 * cpus
    assert sum(size.memory_gib for size in sizes) <= 0.9 * memory_gib
