"""The inputs of a launch become overrides of its recipe, and nothing is set twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.recipe import Recipe, load_recipe, write_recipe
from slipstream.stages.launch import requested, require_loop, with_lag
from slipstream.types import ArmLoop, Workload
from tests.unit.lagging import ONE_STEP_OFF


def refusal(*overrides: str, num_steps: int = 0) -> str:
    with pytest.raises(ConfigError) as caught:
        requested(overrides, num_steps=num_steps, seed=1)
    return str(caught.value)


def with_loop(directory: Path, **loop: Any) -> Recipe:
    recipe = load_recipe("tiny", overrides={**ONE_STEP_OFF, "loop": loop})
    write_recipe(recipe, directory / "recipe.yaml")
    return recipe


def lagging(
    changes: dict[str, Any], recipe: str, lag: int, *, loop: ArmLoop | None = ArmLoop.ASYNCHRONOUS
) -> dict[str, Any]:
    return with_lag(changes, recipe, workload=Workload.RL_ZERO, max_off_policy_steps=lag, loop=loop)


def test_overrides_steps_and_seed_are_laid_together() -> None:
    changes = ["grpo.group_size=16", "grpo.optimizer.learning_rate=1e-6", "name=mine"]
    assert requested(changes, num_steps=5, seed=7) == {
        "grpo": {"group_size": 16, "optimizer": {"learning_rate": "1e-6"}, "num_steps": 5, "seed": 7},
        "name": "mine",
    }


def test_zero_steps_keep_the_recipes() -> None:
    assert requested([], num_steps=0, seed=0) == {"grpo": {"seed": 0}}


@pytest.mark.parametrize(
    ("item", "name", "own"),
    [
        ("workload=rl_think", "workload", "workload"),
        ("grpo.seed=1", "grpo.seed", "seed"),
        ("grpo.num_steps=9", "grpo.num_steps", "num_steps"),
        ("grpo={seed: 1}", "grpo.seed", "seed"),
        ("loop.max_off_policy_steps=2", "loop.max_off_policy_steps", "max_off_policy_steps"),
    ],
)
def test_a_field_with_an_input_of_its_own_is_refused_among_overrides(item: str, name: str, own: str) -> None:
    assert refusal(item) == f"overrides must leave out {name}, got {name!r}; give the input {own}"


def test_a_lag_makes_a_synchronous_recipe_one_step_off() -> None:
    assert lagging({}, "tiny", 2) == {"loop": {"max_off_policy_steps": 2, "mode": "one_step_off"}}
    assert lagging({"name": "mine"}, "tiny", 0) == {"name": "mine"}


def test_a_lag_leaves_a_loop_as_the_recipe_or_the_overrides_have_it(tmp_path: Path) -> None:
    with_loop(tmp_path, mode="in_flight", max_off_policy_steps=1)
    assert lagging({}, str(tmp_path / "recipe.yaml"), 3) == {"loop": {"max_off_policy_steps": 3}}
    chosen = {"loop": {"mode": "in_flight", "kv_cache": "keep"}}
    assert lagging(chosen, "tiny", 1) == {"loop": {**chosen["loop"], "max_off_policy_steps": 1}}


def test_a_negative_lag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^max_off_policy_steps must be >= 0, got -1; 0 keeps the recipe's$"):
        lagging({}, "tiny", -1)


def test_a_lag_is_refused_where_nothing_lags() -> None:
    with pytest.raises(ConfigError) as refused:
        lagging({}, "tiny", 1, loop=ArmLoop.SYNCHRONOUS)
    fix = "launch asynchronous_rl, which trains every arm in both loops"
    assert str(refused.value) == f"max_off_policy_steps must be 0 here, got 1; {fix}"
    assert lagging({}, "tiny", 0, loop=ArmLoop.SYNCHRONOUS) == {}


def test_a_workflow_takes_the_recipes_of_its_loop_alone(tmp_path: Path) -> None:
    asynchronous, synchronous = with_loop(tmp_path, mode="one_step_off", max_off_policy_steps=1), load_recipe("tiny")
    require_loop(asynchronous, ArmLoop.ASYNCHRONOUS)
    require_loop(synchronous, ArmLoop.SYNCHRONOUS)
    with pytest.raises(ConfigError) as refused:
        require_loop(asynchronous, ArmLoop.SYNCHRONOUS)
    assert str(refused.value) == (
        "loop.mode must be synchronous here, got 'one_step_off'; launch asynchronous_rl, which trains every arm in "
        "both loops"
    )
    with pytest.raises(ConfigError) as refused:
        require_loop(synchronous, ArmLoop.ASYNCHRONOUS)
    assert str(refused.value) == (
        "loop.mode must be one_step_off or in_flight here, got 'synchronous'; set it, or max_off_policy_steps at the "
        "launch; speculative_rl trains synchronously"
    )


def test_a_negative_number_of_steps_is_refused() -> None:
    assert refusal(num_steps=-1) == "num_steps must be >= 0, got -1; 0 keeps the recipe's"
