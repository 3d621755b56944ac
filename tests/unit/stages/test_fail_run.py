"""An execution that failed: its runs end, and what it knows is kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.recipe import load_recipe, write_recipe
from slipstream.records.files import write_record
from slipstream.records.stages import TuningRecord
from slipstream.stages.context import recorded_recipe, write_arms
from slipstream.stages.fail_run import fail_run
from slipstream.stages.runs import execution_run
from slipstream.tracking.config import TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import read_executions
from slipstream.tracking.tracker import Tracker
from slipstream.types import Arms
from tests.small import run_context
from tests.unit.lagging import ONE_STEP_OFF
from tests.unit.report.handmade import CERTIFICATE, RECORD


def _failed(root: Path, message: str = "lost", **overrides: Any) -> tuple[str, Path]:
    """Fail an execution of the tiny recipe; the page that it leaves, and where."""
    write_recipe(load_recipe("tiny", overrides=overrides), recorded_recipe(root, "e"))
    fail_run(root, "e", message=message)
    directory = root / "e" / "fail_run"
    return (directory / "failure.md").read_text(), directory


def test_a_failed_executions_runs_end_and_its_results_are_kept(stored_root: Path) -> None:
    context, recipe = run_context(stored_root), load_recipe("tiny")
    execution_run(context, recipe).detach()
    key = "e/train_grpo_speculative"
    left_open = Tracker(recipe.tracking, root=stored_root, experiment=recipe.name, key=key, name="arm")
    left_open.detach()  # as a pod that was killed leaves it
    tuning = TuningRecord(chosen_k=3, reason="k=3 won", points=(), schedule=())
    write_record(tuning, context.directory("tune_draft_length") / "tuning.json")

    page, directory = _failed(stored_root, "train_grpo_speculative: the loss is not finite")

    stages = ("Failed stage: train_grpo_speculative", "tune_draft_length: finished")
    assert [words for words in (*stages, "the loss is not finite", "k=3 won") if words not in page] == []
    record = json.loads((directory / "failure.json").read_text())
    assert record["finished"] == ["tune_draft_length"]
    (run,) = read_executions(store_uri(TrackingConfig(), stored_root), names=["e"])
    assert (run.status, run.tags["failed.node"]) == ("FAILED", "train_grpo_speculative")


def test_an_execution_that_never_started_has_nothing_to_end(tmp_path: Path) -> None:
    fail_run(tmp_path, "e", message="grpo.group_size must be >= 2, got 1")
    assert not list(tmp_path.iterdir())


def test_a_failed_execution_of_one_arm_awaits_no_other_and_no_draft(stored_root: Path) -> None:
    write_arms(stored_root, "e", Arms.AUTOREGRESSIVE)
    page, _ = _failed(stored_root)
    assert "- train_grpo_autoregressive: not finished" in page
    assert not [word for word in ("speculative", "draft", "losslessness") if word in page]


def test_a_failed_asynchronous_execution_names_the_arms_of_both_loops(stored_root: Path) -> None:
    for node, loop in (("", "synchronous"), ("_asynchronous", "one_step_off")):
        record = replace(RECORD.arms[0], loop=loop, max_off_policy_steps=int(loop != "synchronous"))
        write_record(record, stored_root / "e" / f"train_grpo_autoregressive{node}" / "arm.json")
    page, _ = _failed(stored_root, **ONE_STEP_OFF)
    assert "Failed stage: prepare_data." in page  # the first that is not finished
    assert "- train_grpo_speculative_asynchronous: not finished" in page
    assert "- evaluate_aime_speculative_asynchronous: not finished" in page
    assert "- autoregressive, k=0: 6 steps of 8.00 s (median), reward 0.100 to 0.500" in page
    assert "- autoregressive, asynchronous, k=0: 6 steps of 8.00 s (median), reward 0.100 to 0.500" in page


@pytest.mark.parametrize(
    ("verdict", "begun", "stages", "failed"),
    [
        ("not lossless", (), ("prepare_data", "certify_losslessness"), "require_lossless"),
        ("lossless", (), ("prepare_data", "certify_losslessness"), "certify_losslessness"),
        ("", ("bake_off",), ("prepare_data", "bake_off"), "bake_off"),
    ],
)
def test_an_execution_of_another_workflow_failed_in_a_stage_that_it_has(
    stored_root: Path, verdict: str, begun: tuple[str, ...], stages: tuple[str, ...], failed: str
) -> None:
    context, recipe = run_context(stored_root), load_recipe("tiny")
    (context.directory("prepare_data") / "manifest.json").write_text("[]")
    if verdict:
        write_record(
            replace(CERTIFICATE, verdict=verdict), context.directory("certify_losslessness") / "certificate.json"
        )
    for name in begun:
        context.directory(name)
    write_recipe(recipe, recorded_recipe(stored_root, "e"))
    fail_run(stored_root, "e", message="lost", stages=stages)
    page = (stored_root / "e" / "fail_run" / "failure.md").read_text()
    assert f"Failed stage: {failed}." in page
    assert "train_grpo" not in page
