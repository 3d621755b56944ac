"""The whole chain as people launch it, at the smallest size that runs every stage."""

import json
from pathlib import Path

import pytest
import yaml

from slipstream.config import merge
from slipstream.recipe import CONFIGS

pytestmark = pytest.mark.slow

SMALL = {
    "name": "smoke",
    "learner": {"num_threads": 1},
    "engine": {"num_threads": 1},
    "policy": {"scratch": {"num_layers": 4, "num_steps": 4, "warmup_steps": 2, "tokens_per_step": 512}},
    "draft": {
        "aux_hidden_state_layer_ids": [1, 2, 3],
        "num_prompts": 32,
        "num_heldout_prompts": 8,
        "num_steps": 4,
        "tokens_per_step": 512,
        "warmup_steps": 1,
    },
    "sampling": {"max_response_tokens": 24},
    "evaluation": {"num_samples_per_problem": 2, "max_response_tokens": 24},
    "tuning": {"candidate_ks": [0, 2], "batch_sizes": [4], "num_repeats": 1},
    "grpo": {"num_steps": 3, "prompts_per_step": 2, "group_size": 2, "checkpoint_every_steps": 2},
    "losslessness": {
        "num_tokens": 400,
        "num_repeated_prompts": 2,
        "num_repeats": 32,
        "num_greedy_prompts": 4,
        "num_replications": 4,
        "max_detectable_bias": 0.99,
    },
    "data": {"synthetic": {"num_train_problems": 100, "num_draft_rows": 100}},
}


def test_the_workflow_runs_every_stage_and_reports(tmp_path: Path) -> None:
    from workflows.speculative_rl import speculative_rl

    values = merge(yaml.safe_load((CONFIGS / "tiny.yaml").read_text()), SMALL)
    recipe = tmp_path / "smoke.yaml"
    recipe.write_text(yaml.safe_dump(values))
    speculative_rl(recipe=str(recipe), run_root=str(tmp_path / "runs"))
    latest = tmp_path / "runs" / "latest"
    report = json.loads((latest / "report.json").read_text())
    assert report["recipe"] == "smoke"
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
