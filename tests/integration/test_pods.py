"""The chain as pods run it, task by task: what a task needs comes through object store and shared root alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.pods import Cluster, TaskFailed, cluster
from tests.integration.small_recipe import write_small_recipe

pytestmark = pytest.mark.slow

_MAX_REPORT_BYTES = 1_000_000  # a page with its figures in it
_MAX_RECORD_BYTES = 200_000  # of a task's records; the data, with prompts and tokenizer, has the most


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Cluster]:
    directory = tmp_path / "pods"
    directory.mkdir()
    with cluster(directory, "fchain") as started:
        yield started


def test_data_is_made_in_a_pod_once_and_taken_from_the_store_by_the_next_execution(
    tmp_path: Path, pods: Cluster
) -> None:
    from workflows.speculative_rl import speculative_rl

    inputs = {"recipe": str(write_small_recipe(tmp_path / "smoke.yaml")), "run_root": str(tmp_path / "shared")}
    first = pods.execute(speculative_rl, inputs, last="prepare-data")["prepare-data"]
    pods.execution = "fagain"
    second = pods.execute(speculative_rl, inputs, last="prepare-data")["prepare-data"]

    made, taken = (pods.fetched(outputs["data"]) for outputs in (first, second))
    assert "tokenizer/tokenizer.json" in made
    assert not any(name.startswith("sources/") for name in made)
    assert made == taken
    assert "reused" in pods.attempts[-1].log


def test_a_wrong_recipe_ends_in_the_first_pod_with_the_field_and_is_not_tried_again(
    tmp_path: Path, pods: Cluster
) -> None:
    from workflows.speculative_rl import speculative_rl

    recipe = write_small_recipe(tmp_path / "smoke.yaml", {"grpo": {"group_size": 1}})

    with pytest.raises(TaskFailed, match=r"start-run: NON_RECOVERABLE(.|\n)*grpo.group_size must be >= 2"):
        pods.execute(speculative_rl, {"recipe": str(recipe), "run_root": str(tmp_path / "shared")})
    assert len(pods.attempts) == 1


def test_the_chain_runs_in_pods_of_its_own_and_moves_records_only(tmp_path: Path, pods: Cluster) -> None:
    from workflows.speculative_rl import speculative_rl

    recipe = write_small_recipe(tmp_path / "smoke.yaml")
    outputs = pods.execute(speculative_rl, {"recipe": str(recipe), "run_root": str(tmp_path / "shared")})

    assert [attempt.kind for attempt in pods.attempts] == [""] * len(pods.attempts)
    (report,) = [literal for literal in outputs[speculative_rl.nodes[-1].id].values()]
    files = pods.fetched(report)
    assert set(files) == {"report.html", "report.json", "run.json", "drift.json", "deliverable.json"}
    assert json.loads(files["report.json"])["recipe"] == "smoke"
    moved = {node.id: pods.uploaded_bytes(node.id) for node in speculative_rl.nodes}
    assert moved.pop("report-speedup") < _MAX_REPORT_BYTES
    assert max(moved.values()) < _MAX_RECORD_BYTES, moved
    for attempt in pods.attempts:
        working = pods.directory / pods.execution / f"{attempt.node}-{attempt.number}"
        assert not list(working.iterdir()), f"{attempt.node} left files in its pod"
