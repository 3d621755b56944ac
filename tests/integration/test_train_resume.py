"""A killed run goes on from its checkpoint and ends with the same losses as one that was never killed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from slipstream.data.prompts import render
from slipstream.recipe import Recipe, load_recipe
from slipstream.records import ArmRecord
from slipstream.types import Arm, Prompt

pytestmark = pytest.mark.slow

SMALL = {
    "policy": {"scratch": {"num_layers": 4, "max_position_embeddings": 256}},
    "draft": {"aux_hidden_state_layer_ids": [1, 2, 3]},
    "sampling": {"max_response_tokens": 16},
    "grpo": {"num_steps": 4, "prompts_per_step": 2, "group_size": 4, "checkpoint_every_steps": 2},
}


def _train(recipe: Recipe, policy: Path, directory: Path) -> ArmRecord:
    from transformers import AutoTokenizer

    from slipstream.loop import workers
    from slipstream.loop.train import ArmPlan, train

    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompts = [
        Prompt(id=str(i), text=f"{i}+1=?", token_ids=render(f"{i}+1=?", tokenizer=tokenizer), answer="1")
        for i in range(8)
    ]
    # An untrained policy answers nothing right: whether a response has a 1 in it stands in for the reward.
    return train(
        recipe,
        ArmPlan(
            arm=Arm.AUTOREGRESSIVE,
            num_speculative_tokens=0,
            start_engine=partial(workers.start_engine, policy, config=recipe.engine),
        ),
        policy=policy,
        prompts=prompts,
        decode=lambda ids: "\\boxed{1}" if sum(ids) % 2 else "",
        directory=directory,
        log=lambda metrics, step: None,
    )


def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, ray_session: None, make_policy: Callable[[Path, int], Path]
) -> None:
    recipe = load_recipe("tiny", overrides=SMALL)
    policy = make_policy(tmp_path / "policy", 0)
    whole = _train(recipe, policy, tmp_path / "whole")
    _train(replace(recipe, grpo=replace(recipe.grpo, num_steps=2)), policy, tmp_path / "killed")
    resumed = _train(recipe, policy, tmp_path / "killed")
    assert [step.step for step in resumed.steps] == [0, 1, 2, 3]
    assert [step.loss for step in resumed.steps] == [step.loss for step in whole.steps]
    assert [step.grad_norm for step in resumed.steps] == [step.grad_norm for step in whole.steps]
    assert any(step.grad_norm > 0 for step in whole.steps), "some step must have learned something"
