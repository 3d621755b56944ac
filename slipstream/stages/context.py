"""An execution: what a launch asks for, and the one value that travels from `start_run` to every other task."""

from __future__ import annotations

import json
import re
import unicodedata
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.config import merge, parse_overrides, require
from slipstream.recipe import Recipe, absolute_paths, leaves, load_recipe
from slipstream.types import Arm, ArmLoop, LoopMode, Workload, arm_name

EXECUTION_VARIABLE = "SLIPSTREAM_EXECUTION"
"""Environment variable that names a local execution before it starts."""

_MAX_NAME = 60  # of the part that a recipe's file gives: directories and MLflow's keys hold more than the execution


def new_execution(recipe: str) -> str:
    """A name for a local execution: the recipe's file and the time to the microsecond, in letters that MLflow takes."""
    letters = unicodedata.normalize("NFKD", Path(recipe).stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", letters).strip("-._")[:_MAX_NAME] or "recipe"
    return f"{name}-{datetime.now(tz=UTC):%Y%m%d-%H%M%S-%f}"


def recorded_recipe(root: Path, execution: str) -> Path:
    """Where an execution keeps the whole recipe that it was started with."""
    return root / execution / "start_run" / "recipe.yaml"


def is_finished(root: Path, execution: str) -> bool:
    """Whether an execution came to its report."""
    return (root / execution / "report_speedup" / "report.json").is_file()


def arm_node(arm: Arm, loop: ArmLoop = ArmLoop.SYNCHRONOUS) -> str:
    """The node that trains an arm: its directory, its deliverable and the key of its MLflow run are called so."""
    return f"train_grpo_{arm_name(arm, loop)}"


@dataclass(frozen=True)
class RunContext:
    """One workflow execution. Flat values only, so that it travels between tasks as it is.

    `root` must be storage that every task of the execution sees (a shared file system on a cluster): checkpoints
    and the tracking spool lie there, and a retried task finds them by `execution` and its own name.
    """

    execution: str
    root: str
    experiment: str
    workload: str
    reuse_stored: bool = True  # take data, policy and draft that an earlier execution made alike

    def directory(self, node: str) -> Path:
        """Where the task `node` keeps what must outlive an attempt."""
        path = Path(self.root) / self.execution / node
        if path.is_symlink() and not path.exists():
            path.unlink()  # to an entry of the store that somebody removed
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def part_of(self) -> str:
        """The ablation that this execution is a part of, by its name `<ablation>/<part>`; empty for a whole one."""
        return self.execution.rpartition("/")[0]

    def shared_directory(self, node: str) -> Path:
        """`directory` of what all parts of an ablation have in common; an execution of its own shares with nobody."""
        return replace(self, execution=self.part_of or self.execution).directory(node)

    def key(self, node: str) -> str:
        """The tracking key of the task `node`: of execution and node, never of the attempt."""
        return f"{self.execution}/{node}"


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
