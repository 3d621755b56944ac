"""The inputs of a launch become overrides of its recipe, and nothing is set twice."""

from __future__ import annotations

import pytest

from slipstream.config import ConfigError
from slipstream.stages.launch import requested


def refusal(*overrides: str, num_steps: int = 0, max_off_policy_steps: int = 0) -> str:
    with pytest.raises(ConfigError) as caught:
        requested(overrides, num_steps=num_steps, seed=1, max_off_policy_steps=max_off_policy_steps)
    return str(caught.value)


def test_overrides_steps_and_seed_are_laid_together() -> None:
    changes = ["grpo.group_size=16", "grpo.optimizer.learning_rate=1e-6", "name=mine"]
    assert requested(changes, num_steps=5, seed=7, max_off_policy_steps=0) == {
        "grpo": {"group_size": 16, "optimizer": {"learning_rate": "1e-6"}, "num_steps": 5, "seed": 7},
        "name": "mine",
    }


def test_zero_steps_keep_the_recipes() -> None:
    assert requested([], num_steps=0, seed=0, max_off_policy_steps=0) == {"grpo": {"seed": 0}}


@pytest.mark.parametrize(
    ("item", "name", "own"),
    [
        ("workload=rl_think", "workload", "workload"),
        ("grpo.seed=1", "grpo.seed", "seed"),
        ("grpo.num_steps=9", "grpo.num_steps", "num_steps"),
        ("grpo={seed: 1}", "grpo.seed", "seed"),
    ],
)
def test_a_field_with_an_input_of_its_own_is_refused_among_overrides(item: str, name: str, own: str) -> None:
    assert refusal(item) == f"overrides must leave out {name}, got {name!r}; give the input {own}"


def test_a_lag_is_refused_until_there_is_a_loop_for_it() -> None:
    assert refusal("placement.mode=split", max_off_policy_steps=1) == (
        "max_off_policy_steps must be 0: training with a lag is not there yet, got 1; launch rl-think-8b instead"
    )


def test_a_negative_number_of_steps_is_refused() -> None:
    assert refusal(num_steps=-1) == "num_steps must be >= 0, got -1; 0 keeps the recipe's"
