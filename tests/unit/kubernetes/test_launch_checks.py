"""What a launch is refused for before anything starts: the root, and the size of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.kubernetes.launch_checks import require_fits, shared_root
from slipstream.kubernetes.profile import read_profile


def refused_root(run_root: str, *, cluster: str, is_local: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        shared_root(run_root, read_profile(cluster), is_local=is_local)
    return str(caught.value)


def test_a_relative_root_is_taken_on_one_machine_and_refused_in_pods() -> None:
    assert shared_root("runs", read_profile("local"), is_local=True) == Path("runs")
    wanted = "run_root must be absolute in pods, got 'runs'; as in /mnt/slipstream/runs"
    assert refused_root("runs", cluster="gb200", is_local=False) == wanted


@pytest.mark.parametrize("is_local", [True, False])
def test_a_uri_is_refused_everywhere_for_it_would_become_a_folder_of_that_name(is_local: bool) -> None:
    message = refused_root("s3://bucket/runs", cluster="gb200", is_local=is_local)
    assert message == "run_root must be a path, not a URI, got 's3://bucket/runs'; as in /mnt/slipstream/runs"


@pytest.mark.parametrize("root", ["/tmp/runs", "/mnt/slipstream/../runs", "/mnt/slipstream2"])
def test_a_root_beside_the_shared_volume_is_refused_in_pods(root: str) -> None:
    wanted = f"run_root must lie below /mnt/slipstream, the shared volume of cluster gb200, got {root!r}; as in "
    assert refused_root(root, cluster="gb200", is_local=False) == wanted + "/mnt/slipstream/runs"


def test_a_root_on_the_shared_volume_is_taken() -> None:
    root = "/mnt/slipstream/team/runs"
    assert shared_root(root, read_profile("gb200"), is_local=False) == Path(root)


def test_tasks_of_the_local_profile_in_processes_of_their_own_take_any_absolute_root() -> None:
    assert shared_root("/data/runs", read_profile("local"), is_local=False) == Path("/data/runs")


@pytest.mark.parametrize(
    ("cluster", "recipe", "message"),
    [
        ("gb200", {"nodes": 9}, "placement.nodes must be <= 8, the nodes of cluster gb200, got 9; override it with"),
        ("gb200", {"gpus_per_node": 8}, "placement.gpus_per_node must be 1 to 4 on cluster gb200, got 8"),
        (
            "gb200",
            {"gpus_per_node": 0},
            "placement.gpus_per_node must be 1 to 4 on cluster gb200, got 0; register for a cluster without GPUs",
        ),
        (
            "gb200",
            {"trains_from_scratch": True},
            "policy.model must name a model on cluster gb200, where prepare_policy",
        ),
        ("cpu", {}, "placement.gpus_per_node must be 0 on cluster cpu, got 4; register for a cluster with GPUs"),
    ],
)
def test_a_recipe_that_the_cluster_cannot_hold_is_refused(cluster: str, recipe: dict[str, Any], message: str) -> None:
    asked = {"nodes": 8, "gpus_per_node": 4, "trains_from_scratch": False} | recipe
    with pytest.raises(ConfigError) as caught:
        require_fits(read_profile(cluster), **asked)
    assert str(caught.value).startswith(message)


def test_a_recipe_may_take_less_than_the_cluster_has() -> None:
    require_fits(read_profile("gb200"), nodes=1, gpus_per_node=1, trains_from_scratch=False)
    require_fits(read_profile("cpu"), nodes=1, gpus_per_node=0, trains_from_scratch=True)
