"""The chain as pods run it, task by task: what a task needs comes through object store and shared root alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.integration.pods import Cluster, cluster
from tests.integration.small_recipe import write_small_recipe

pytestmark = pytest.mark.slow

_MAX_REPORT_BYTES = 1_000_000  # a page with its figures in it
_MAX_RECORD_BYTES = 200_000  # of a task's records; the data, with prompts and tokenizer, has the most


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the recipe and of what the pods share."""
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def pods(directory: Path, ray_session: None) -> Iterator[Cluster]:
    """Pods that share a Ray, as those of a Ray cluster do; that which trains has its own, and a small /dev/shm."""
    with cluster(directory / "pods", "fchain") as started:
        started.ray_address, started.own_ray = ray.get_runtime_context().gcs_address, frozenset({"train"})
        yield started


@pytest.fixture(scope="module")
def inputs(directory: Path) -> dict[str, str]:
    return {"recipe": str(write_small_recipe(directory / "smoke.yaml")), "run_root": str(directory / "shared")}


@pytest.fixture(scope="module")
def outputs(inputs: dict[str, str], pods: Cluster) -> dict[str, dict[str, Any]]:
    """Outputs of the whole chain, by node."""
    from workflows.speculative_rl import speculative_rl

    return pods.execute(speculative_rl, inputs)


def test_the_chain_runs_in_pods_of_its_own_and_moves_records_only(
    pods: Cluster, outputs: dict[str, dict[str, Any]]
) -> None:
    assert [attempt.kind for attempt in pods.attempts] == [""] * len(pods.attempts)
    (report,) = outputs["measure-0-drift"].values()
    files = pods.fetched(report)
    assert set(files) == {"report.html", "report.json", "run.json", "drift.json", "deliverable.json"}
    assert json.loads(files["report.json"])["recipe"] == "smoke"
    moved = {node: pods.uploaded_bytes(node) for node in outputs}
    assert moved.pop("measure-0-report") < _MAX_REPORT_BYTES
    assert max(moved.values()) < _MAX_RECORD_BYTES, moved
    for attempt in pods.attempts:
        working = pods.directory / pods.execution / f"{attempt.node}-{attempt.number}"
        assert not list(working.iterdir()), f"{attempt.node} left files in its pod"


def test_the_next_execution_takes_its_data_from_the_store(
    inputs: dict[str, str], pods: Cluster, outputs: dict[str, dict[str, Any]]
) -> None:
    from workflows.speculative_rl import speculative_rl

    made = pods.fetched(outputs["prepare-0-data"]["data"])
    assert "tokenizer/tokenizer.json" in made
    assert not any(name.startswith("sources/") for name in made)
    pods.execution = "fagain"
    outputs_again = pods.execute(speculative_rl, inputs, last="prepare-0-data")
    again = pods.fetched(outputs_again["prepare-0-data"]["data"])
    assert again.pop("deliverable.json") == made.pop("deliverable.json").replace(b"fchain", b"fagain")  # the path
    assert again == made
    assert "reused" in pods.attempts[-1].log
