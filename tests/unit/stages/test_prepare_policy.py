"""The policy's stage takes the tokenizer that the data were rendered with, or resolves a model that is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.data.tokenizer import write_tokenizer
from slipstream.recipe import load_recipe
from slipstream.stages.context import RunContext
from slipstream.stages.prepare_policy import prepare_policy
from slipstream.stages.support import tokenizer
from slipstream.tracking.config import TrackingConfig

UNTRACKED = TrackingConfig(uri="http://127.0.0.1:9", replay_every_s=0.1, close_wait_s=0.0)


@pytest.mark.slow  # Ray, and Megatron in a process of its own
def test_a_policy_from_random_weights_has_the_tokenizer_of_the_data(tmp_path: Path) -> None:
    scratch = {"num_layers": 22, "hidden_size": 32, "num_steps": 1, "warmup_steps": 0, "tokens_per_step": 256}
    recipe = replace(load_recipe("tiny", overrides={"policy": {"scratch": scratch}}), tracking=UNTRACKED)
    context = RunContext(execution="e", root=str(tmp_path / "runs"), experiment="tiny", workload="rl_zero")
    write_tokenizer(tmp_path / "data" / "tokenizer", max_length=333)  # not what the recipe's own would be

    policy = prepare_policy(context, recipe, data=tmp_path / "data")

    assert tokenizer(policy).model_max_length == 333
