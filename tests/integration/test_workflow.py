"""The whole chain as people launch it, at the smallest size that runs every stage.

RL-Think here; `test_interrupt.py` runs RL-Zero to its end.
"""

import json
from pathlib import Path

import pytest

from slipstream.types import Workload
from tests.integration.small_recipe import write_small_recipe

pytestmark = pytest.mark.slow


def test_the_workflow_runs_every_stage_and_reports(tmp_path: Path) -> None:
    from workflows.speculative_rl import speculative_rl

    recipe = write_small_recipe(tmp_path / "smoke.yaml")
    speculative_rl(recipe=str(recipe), workload=Workload.RL_THINK, run_root=str(tmp_path / "runs"))
    latest = tmp_path / "runs" / "latest"
    report = json.loads((latest / "report.json").read_text())
    assert (report["recipe"], report["workload"]) == ("smoke", "rl_think")
    assert set(report["stages"]["autoregressive"]) == {"data", "prepare", "generation", "logprob", "train"}
    assert [len(rewards) for rewards in report["reward"].values()] == [3, 3]
    assert {point["k"] for point in report["sweep"]} == {0, 2}
    assert set(report["aime24"]) == {"start", "autoregressive", "speculative"}
    certificate = json.loads((latest / "run.json").read_text())["certificate"]
    assert certificate["verdict"] == "lossless"
    assert certificate["num_tokens"] >= 400
    assert all(
        step["refit"]["num_tensors"] > 0
        for arm in json.loads((latest / "run.json").read_text())["arms"]
        for step in arm["steps"]
    )
    assert (latest / "report.html").stat().st_size > 10_000
