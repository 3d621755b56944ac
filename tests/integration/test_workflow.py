"""The whole chain as people launch it, at the smallest size that runs every stage, and the example in one file.

RL-Think in both loops here; `test_interrupt.py` runs one arm of RL-Zero to its end, synchronously.
"""

import json
import re
from pathlib import Path

import pytest

from examples import one_file_grpo
from slipstream.tracking.mlflow_store import read_executions
from slipstream.types import Workload
from tests.integration.small_recipe import write_small_recipe
from tests.unit.lagging import ONE_STEP_OFF

pytestmark = pytest.mark.slow


def test_the_workflow_runs_every_stage_in_both_loops_and_reports(tmp_path: Path) -> None:
    from workflows.asynchronous_rl import asynchronous_rl

    recipe = write_small_recipe(tmp_path / "smoke.yaml", ONE_STEP_OFF)
    asynchronous_rl(recipe=str(recipe), workload=Workload.RL_THINK, run_root=str(tmp_path / "runs"))
    latest = tmp_path / "runs" / "latest"
    report, run = (json.loads((latest / name).read_text()) for name in ("report.json", "run.json"))
    assert (report["recipe"], report["workload"]) == ("smoke", "rl_think")
    assert set(report["stages"]["autoregressive"]) == {"data", "prepare", "generation", "logprob", "train"}
    assert [len(rewards) for rewards in report["reward"].values()] == [3, 3]
    assert {point["k"] for point in report["sweep"]} == {0, 2}
    arms = ["autoregressive", "speculative", "autoregressive_asynchronous", "speculative_asynchronous"]
    assert set(report["validation"]) == {"start", *arms}
    assert run["certificate"]["verdict"] == "lossless"
    assert run["certificate"]["num_tokens"] >= 400
    assert all(step["refit"]["num_tensors"] > 0 for arm in run["arms"] for step in arm["steps"])
    assert (latest / "report.html").stat().st_size > 10_000
    assert list(report["asynchronous"]["arms"]) == arms
    for arm in run["asynchronous"]:
        assert (arm["loop"], arm["max_off_policy_steps"]) == ("one_step_off", 1)
        # Batch t comes from version t - 1, the first one from the version that it trains.
        assert [step["policy_version"] for step in arm["steps"]] == [0, 0, 1]
        assert [[lag["lag"] for lag in step["lags"]] for step in arm["steps"]] == [[0], [1], [1]]
    nodes = [path.parent.name for path in (tmp_path / "runs").glob("*/train_grpo_*/arm.json")]
    assert sorted(nodes) == sorted(f"train_grpo_{name}" for name in arms)
    uri = run["tracking_uri"]
    assert sum(name.startswith("result/asynchronous_step_speedup") for name in read_executions(uri)[0].metrics) >= 2


def test_the_loop_in_one_file_trains_a_policy(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_file_grpo, "reward", lambda prompt, response: float(len(response) % 2))
    recipe = write_small_recipe(tmp_path / "recipe.yaml")
    command = ["--recipe", str(recipe), "--num-steps", "2", "--num-drafted", "2", "--output", str(tmp_path / "policy")]
    means = one_file_grpo.main(command)
    steps = re.findall(r"step (\d)/2: .*? (\d+) tensors compared, gradient norm ([\d.]+), acc", capsys.readouterr().out)
    assert [step for step, _, _ in steps] == ["1", "2"]
    assert all(int(tensors) > 0 for _, tensors, _ in steps)
    assert any(0 < mean < 1 for mean in means)
    assert any(float(norm) > 0 for _, _, norm in steps)
    assert (tmp_path / "policy" / "model.safetensors").is_file()
