"""The inputs of a launch as overrides of its recipe, and the recipes that a workflow takes."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slipstream.config import merge, parse_overrides, require
from slipstream.recipe import Recipe, absolute_paths, leaves, load_recipe
from slipstream.types import ArmLoop, LoopMode, Workload

_INPUTS = {
    "workload": "workload",
    "grpo.seed": "seed",
    "grpo.num_steps": "num_steps",
    "loop.max_off_policy_steps": "max_off_policy_steps",
}
"""Fields of a recipe that have an input of their own."""
_IN_BOTH_LOOPS = "launch asynchronous_rl, which trains every arm in both loops"


def add_inputs(command: ArgumentParser) -> None:
    """The options of a command that are inputs of a workflow; one that is not given keeps the recipe's value."""
    command.add_argument("--workload", choices=list(Workload), type=Workload, help="default: the recipe's")
    command.add_argument("--num-steps", type=int, help="GRPO steps an arm; default: the recipe's")
    command.add_argument("--seed", type=int, help="of prompts, sampling and training; default: the recipe's")


def requested(
    overrides: Iterable[str], *, workload: Workload | None = None, num_steps: int | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Collect what a launch changes in its recipe: an input that is None changes nothing, any other wins over the file.

    Args:
        overrides: as in `grpo.group_size=16`.
    Raises:
        ConfigError: an item that cannot be read or has an input of its own.
    """
    values = parse_overrides(overrides)
    for name, own in _INPUTS.items():
        require(not _holds(values, name), "overrides", f"must leave out {name}", name, f"give the input {own}")
    grpo = {name: value for name, value in (("num_steps", num_steps), ("seed", seed)) if value is not None}
    if workload is not None:
        values = merge(values, {"workload": workload.value})
    return merge(values, {"grpo": grpo}) if grpo else values


def with_lag(
    changes: Mapping[str, Any], recipe: str, *, max_off_policy_steps: int | None, loop: ArmLoop | None
) -> dict[str, Any]:
    """The changes of a launch, and that rollouts may lag: `one_step_off` where neither they nor the recipe say how.

    Args:
        recipe: name of the recipe, or a path to it.
        max_off_policy_steps: None keeps the recipe's.
        loop: what the workflow is there for; None of one that trains no arm.
    Raises:
        ConfigError: rollouts are to lag in a workflow that trains synchronously.
    """
    lag = max_off_policy_steps
    if lag is None:
        return dict(changes)
    rule = "must be left out or 0 here"
    require(lag == 0 or loop is not ArmLoop.SYNCHRONOUS, "max_off_policy_steps", rule, lag, _IN_BOTH_LOOPS)
    values: dict[str, Any] = {"max_off_policy_steps": lag}
    of = {name: changes[name] for name in ("workload",) if name in changes}
    if lag and not _holds(changes, "loop.mode") and load_recipe(recipe, overrides=of).loop.is_synchronous:
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


def handed_on(overrides: Iterable[str]) -> tuple[str, ...]:
    """Overrides for a process in another working directory: relative paths in them are absolute.

    Raises:
        ConfigError: an item that cannot be read.
    """
    items = list(overrides)
    given, absolute = parse_overrides(items), absolute_paths(parse_overrides(items), Path.cwd())
    if given == absolute:
        return tuple(items)
    return tuple(f"{name}={json.dumps(value)}" for name, value in leaves(absolute).items())
