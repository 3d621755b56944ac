"""The inputs of a launch as overrides of its recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slipstream.config import merge, parse_overrides, require

_INPUTS = {"workload": "workload", "grpo.seed": "seed", "grpo.num_steps": "num_steps"}
"""Fields of a recipe that have an input of their own."""


def requested(overrides: Iterable[str], *, num_steps: int, seed: int, max_off_policy_steps: int) -> dict[str, Any]:
    """What a launch changes in its recipe.

    Args:
        overrides: as in `grpo.group_size=16`.
        num_steps: 0 keeps the recipe's.
    Raises:
        ConfigError: an item that cannot be read or has an input of its own; a lag, which no loop has yet.
    """
    rule = "must be 0: training with a lag is not there yet"
    require(max_off_policy_steps == 0, "max_off_policy_steps", rule, max_off_policy_steps, "launch rl-think-8b instead")
    require(num_steps >= 0, "num_steps", "must be >= 0", num_steps, "0 keeps the recipe's")
    values = parse_overrides(overrides)
    for name, own in _INPUTS.items():
        require(not _holds(values, name), "overrides", f"must leave out {name}", name, f"give the input {own}")
    return merge(values, {"grpo": {"seed": seed, **({"num_steps": num_steps} if num_steps else {})}})


def _holds(values: Mapping[str, Any], name: str) -> bool:
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True
