"""The inputs of a launch as overrides of its recipe, and the recipes that a workflow takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slipstream.config import merge, parse_overrides, require
from slipstream.recipe import Recipe, load_recipe
from slipstream.types import ArmLoop, LoopMode, Workload

_INPUTS = {
    "workload": "workload",
    "grpo.seed": "seed",
    "grpo.num_steps": "num_steps",
    "loop.max_off_policy_steps": "max_off_policy_steps",
}
"""Fields of a recipe that have an input of their own."""
_IN_BOTH_LOOPS = "launch asynchronous_rl, which trains every arm in both loops"


def requested(overrides: Iterable[str], *, num_steps: int, seed: int) -> dict[str, Any]:
    """What a launch changes in its recipe.

    Args:
        overrides: as in `grpo.group_size=16`.
        num_steps: 0 keeps the recipe's.
    Raises:
        ConfigError: an item that cannot be read or has an input of its own.
    """
    require(num_steps >= 0, "num_steps", "must be >= 0", num_steps, "0 keeps the recipe's")
    values = parse_overrides(overrides)
    for name, own in _INPUTS.items():
        require(not _holds(values, name), "overrides", f"must leave out {name}", name, f"give the input {own}")
    return merge(values, {"grpo": {"seed": seed, **({"num_steps": num_steps} if num_steps else {})}})


def with_lag(
    changes: Mapping[str, Any], recipe: str, *, workload: Workload, max_off_policy_steps: int, loop: ArmLoop | None
) -> dict[str, Any]:
    """The changes of a launch, and that rollouts may lag: `one_step_off` where neither they nor the recipe say how.

    Args:
        recipe: name of the recipe, or a path to it.
        max_off_policy_steps: 0 keeps the recipe's.
        loop: what the workflow is there for; None of one that trains no arm.
    Raises:
        ConfigError: rollouts are to lag in a workflow that trains synchronously.
    """
    lag = max_off_policy_steps
    require(lag >= 0, "max_off_policy_steps", "must be >= 0", lag, "0 keeps the recipe's")
    require(lag == 0 or loop is not ArmLoop.SYNCHRONOUS, "max_off_policy_steps", "must be 0 here", lag, _IN_BOTH_LOOPS)
    if not lag:
        return dict(changes)
    values: dict[str, Any] = {"max_off_policy_steps": lag}
    if not _holds(changes, "loop.mode") and load_recipe(recipe, workload=workload).loop.is_synchronous:
        values["mode"] = LoopMode.ONE_STEP_OFF.value
    return merge(changes, {"loop": values})


def require_loop(recipe: Recipe, loop: ArmLoop) -> None:
    """Refuse a recipe that is of no use to a workflow whose arms are trained in `loop`.

    Raises:
        ConfigError: the recipe is asynchronous and the workflow is not, or the other way about.
    """
    mode = recipe.loop.mode
    if loop is ArmLoop.SYNCHRONOUS:
        require(mode is LoopMode.SYNCHRONOUS, "loop.mode", "must be synchronous here", mode.value, _IN_BOTH_LOOPS)
    else:
        rule = f"must be {LoopMode.ONE_STEP_OFF.value} or {LoopMode.IN_FLIGHT.value} here"
        fix = "set it, or max_off_policy_steps at the launch; speculative_rl trains synchronously"
        require(mode is not LoopMode.SYNCHRONOUS, "loop.mode", rule, mode.value, fix)


def _holds(values: Mapping[str, Any], name: str) -> bool:
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True
