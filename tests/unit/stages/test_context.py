"""The inputs of a launch become overrides of its recipe, and nothing is set twice."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import parse_overrides
from slipstream.recipe import Recipe, load_recipe, write_recipe
from slipstream.stages.context import handed_on, requested, require_arms, require_loop, with_lag
from slipstream.types import ArmLoop, Arms, Workload
from tests.unit.lagging import ONE_STEP_OFF

Refusal = Callable[..., str]
ELSEWHERE = "launch asynchronous_rl, which trains every arm in both loops"


def with_loop(directory: Path, **loop: Any) -> Recipe:
    recipe = load_recipe("tiny", overrides={**ONE_STEP_OFF, "loop": loop})
    write_recipe(recipe, directory / "recipe.yaml")
    return recipe


def lagging(changes: dict[str, Any], recipe: str, lag: int | None, loop: ArmLoop = ArmLoop.ASYNCHRONOUS) -> Any:
    return with_lag(changes, recipe, max_off_policy_steps=lag, loop=loop)


def test_inputs_are_laid_together_and_one_that_is_not_given_changes_nothing() -> None:
    assert requested([]) == {}
    assert requested([], workload=Workload.RL_ZERO, seed=0) == {"workload": "rl_zero", "grpo": {"seed": 0}}
    changes = ["grpo.group_size=16", "grpo.optimizer.learning_rate=1e-6", "name=mine"]
    assert requested(changes, num_steps=5, seed=7) == {
        "grpo": {"group_size": 16, "optimizer": {"learning_rate": "1e-6"}, "num_steps": 5, "seed": 7},
        "name": "mine",
    }


def test_overrides_for_a_process_elsewhere_hold_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = ("grpo.group_size=16", "policy.model=Qwen/Qwen3-8B")
    assert handed_on(plain) == plain
    handed = handed_on(["draft.model=./draft", "data.train=[{path: a.jsonl, max_rows: 3}]", "name=mine"])
    assert parse_overrides(handed) == {
        "draft": {"model": f"{tmp_path}/draft"},
        "data": {"train": [{"path": f"{tmp_path}/a.jsonl", "max_rows": 3}]},
        "name": "mine",
    }


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
def test_a_field_with_an_input_is_refused_among_overrides(refusal: Refusal, item: str, name: str, own: str) -> None:
    said = refusal(requested, overrides=(item,), seed=1)
    assert said == f"overrides must leave out {name}, got {name!r}; give the input {own}"


def test_a_lag_makes_a_synchronous_recipe_one_step_off_and_leaves_another_loop_as_it_is(tmp_path: Path) -> None:
    assert lagging({}, "tiny", 2) == {"loop": {"max_off_policy_steps": 2, "mode": "one_step_off"}}
    assert lagging({"name": "mine"}, "tiny", None) == {"name": "mine"}
    with_loop(tmp_path, mode="in_flight", max_off_policy_steps=1)
    for lag in (3, 0):
        assert lagging({}, str(tmp_path / "recipe.yaml"), lag) == {"loop": {"max_off_policy_steps": lag}}
    chosen = {"loop": {"mode": "in_flight", "kv_cache": "keep"}}
    assert lagging(chosen, "tiny", 1) == {"loop": {**chosen["loop"], "max_off_policy_steps": 1}}


def test_a_lag_is_refused_where_nothing_lags(refusal: Refusal) -> None:
    said = refusal(partial(lagging, {}, "tiny", 1, ArmLoop.SYNCHRONOUS))
    assert said == f"max_off_policy_steps must be left out or 0 here, got 1; {ELSEWHERE}"
    assert lagging({}, "tiny", None, ArmLoop.SYNCHRONOUS) == {}


def test_a_workflow_takes_the_recipes_of_its_loop_alone(tmp_path: Path, refusal: Refusal) -> None:
    asynchronous, synchronous = with_loop(tmp_path, mode="one_step_off", max_off_policy_steps=1), load_recipe("tiny")
    require_loop(asynchronous, ArmLoop.ASYNCHRONOUS)
    require_loop(synchronous, ArmLoop.SYNCHRONOUS)
    assert refusal(require_loop, recipe=asynchronous, loop=ArmLoop.SYNCHRONOUS) == (
        f"loop.mode must be synchronous here, got 'one_step_off'; {ELSEWHERE}"
    )
    assert refusal(require_loop, recipe=synchronous, loop=ArmLoop.ASYNCHRONOUS) == (
        "loop.mode must be one_step_off or in_flight here, got 'synchronous'; set it, or max_off_policy_steps at the "
        "launch; speculative_rl trains synchronously"
    )


def test_only_the_autoregressive_arm_is_trained_on_sglang(refusal: Refusal) -> None:
    recipe = load_recipe("tiny", overrides={"engine": {"backend": "sglang"}})
    require_arms(recipe, Arms.AUTOREGRESSIVE)
    require_arms(load_recipe("tiny"), Arms.BOTH)
    for arms in (Arms.SPECULATIVE, Arms.BOTH):
        assert refusal(require_arms, recipe=recipe, arms=arms) == (
            f"engine.backend must be vllm with --arms {arms.value}, got 'sglang'; no speculation was seen on SGLang: "
            "set --arms autoregressive"
        )
