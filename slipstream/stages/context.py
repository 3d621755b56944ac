"""An execution: the inputs of a launch, and the one value that travels from `start_run` to every other task."""

from __future__ import annotations

import json
import re
import unicodedata
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.config import merge, parse_overrides, require
from slipstream.engine.config import Backend
from slipstream.recipe import Recipe, absolute_paths, leaves, load_recipe
from slipstream.records.files import read_record, write_record
from slipstream.records.run import LaunchRecord
from slipstream.types import Arm, ArmLoop, Arms, LoopMode, Workload, arm_name

EXECUTION_VARIABLE = "SLIPSTREAM_EXECUTION"
"""Environment variable that names a local execution before it starts."""

_MAX_NAME = 60  # characters of the recipe's file name: directories and MLflow's keys hold more than the execution


def new_execution(recipe: str) -> str:
    """Name of a local execution: the recipe's file and the time to the microsecond, in characters that MLflow takes."""
    letters = unicodedata.normalize("NFKD", Path(recipe).stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", letters).strip("-._")[:_MAX_NAME] or "recipe"
    return f"{name}-{datetime.now(tz=UTC):%Y%m%d-%H%M%S-%f}"


def recorded_recipe(root: Path, execution: str) -> Path:
    """Path of the whole recipe that an execution was started with."""
    return root / execution / "start_run" / "recipe.yaml"


def write_arms(root: Path, execution: str, arms: Arms, *, flyte_execution: str = "") -> None:
    """Record the arms that an execution is started with, and Flyte's execution that starts it, beside its recipe."""
    launch = LaunchRecord(arms=arms, flyte_execution=flyte_execution)
    write_record(launch, recorded_recipe(root, execution).with_name("launch.json"))


def recorded_arms(root: Path, execution: str) -> Arms:
    """Return the arms that an execution was started with."""
    return _launch(root, execution).arms


def started_by(root: Path, execution: str) -> str:
    """Return Flyte's execution that started or resumed `execution` last: its own, if none is recorded."""
    return _launch(root, execution).flyte_execution or execution


def _launch(root: Path, execution: str) -> LaunchRecord:
    path = recorded_recipe(root, execution).with_name("launch.json")
    return read_record(LaunchRecord, path) if path.is_file() else LaunchRecord()


def is_finished(root: Path, execution: str) -> bool:
    """Return True if an execution has written its report."""
    return (root / execution / "report_speedup" / "report.json").is_file()


def arm_node(arm: Arm, loop: ArmLoop = ArmLoop.SYNCHRONOUS) -> str:
    """Node that trains an arm: the name of its directory and deliverable, and the key of its MLflow run."""
    return f"train_grpo_{arm_name(arm, loop)}"


@dataclass(frozen=True)
class RunContext:
    """One workflow execution. All values are flat, so that it travels between tasks as it is.

    `root` must be storage that every task of the execution sees (a shared file system on a cluster): checkpoints
    and the tracking spool lie there, and a retried task finds them by `execution` and its own name.
    """

    execution: str
    root: str
    reuse_stored: bool = True  # take data, policy and draft that an earlier execution made alike
    arms: str = Arms.BOTH.value

    def directory(self, node: str) -> Path:
        """Directory of the task `node`, for files that must outlive an attempt."""
        path = Path(self.root) / self.execution / node
        if path.is_symlink() and not path.exists():
            path.unlink()  # its entry of the store was removed
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def part_of(self) -> str:
        """Ablation that this execution, named `<ablation>/<part>`, is a part of; empty for a whole execution."""
        return self.execution.rpartition("/")[0]

    @property
    def speculates(self) -> bool:
        """Return True if the execution has a speculative arm, and so a draft."""
        return Arm.SPECULATIVE in Arms(self.arms).members


_INPUTS = ("workload", "grpo.seed", "grpo.num_steps", "loop.max_off_policy_steps")
"""Fields of a recipe that have an input of their own, under the field's name."""
_IN_BOTH_LOOPS = "launch asynchronous_rl, which trains every arm in both loops"


def add_inputs(command: ArgumentParser) -> None:
    """Add the options of a command that are inputs of a workflow; one that is not given keeps the recipe's value."""
    command.add_argument("--workload", choices=list(Workload), type=Workload, help="default: the recipe's")
    command.add_argument("--num-steps", type=int, help="GRPO steps an arm; default: the recipe's")
    command.add_argument("--seed", type=int, help="of prompts, sampling and training; default: the recipe's")


def add_set(command: ArgumentParser, *aliases: str) -> None:
    """Add the option `--set` of a command that reads a recipe."""
    words = "set fields of the recipe, as in grpo.group_size=16"
    command.add_argument("--set", *aliases, nargs="+", action="extend", default=[], metavar="FIELD=VALUE", help=words)


def requested(
    overrides: Iterable[str], *, workload: Workload | None = None, num_steps: int | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Collect a launch's changes to its recipe: an input that is None changes nothing, any other overrides the file."""
    values = parse_overrides(overrides)
    taken = leaves(values)
    for name in _INPUTS:
        fix = f"give the input {name.rpartition('.')[2]}"
        require(name not in taken, "overrides", f"must leave out {name}", name, fix)
    grpo = {name: value for name, value in (("num_steps", num_steps), ("seed", seed)) if value is not None}
    if workload is not None:
        values = merge(values, {"workload": workload.value})
    return merge(values, {"grpo": grpo}) if grpo else values


def with_lag(
    changes: Mapping[str, Any], recipe: str, *, max_off_policy_steps: int | None, loop: ArmLoop | None
) -> dict[str, Any]:
    """Add a lag to the changes of a launch, and `one_step_off` where neither they nor the recipe set a mode.

    A workflow that trains its arms synchronously refuses a lag; `loop` is None where a workflow trains no arm.
    """
    lag = max_off_policy_steps
    if lag is None:
        return dict(changes)
    rule = "must be left out or 0 here"
    require(lag == 0 or loop is not ArmLoop.SYNCHRONOUS, "max_off_policy_steps", rule, lag, _IN_BOTH_LOOPS)
    values: dict[str, Any] = {"max_off_policy_steps": lag}
    of = {name: changes[name] for name in ("workload",) if name in changes}
    if lag and "loop.mode" not in leaves(changes) and load_recipe(recipe, overrides=of).loop.is_synchronous:
        values["mode"] = LoopMode.ONE_STEP_OFF.value
    return merge(changes, {"loop": values})


def require_loop(recipe: Recipe, loop: ArmLoop) -> None:
    """Refuse a recipe that does not suit a workflow whose arms are trained in `loop`."""
    mode = recipe.loop.mode
    if loop is ArmLoop.SYNCHRONOUS:
        require(mode is LoopMode.SYNCHRONOUS, "loop.mode", "must be synchronous here", mode.value, _IN_BOTH_LOOPS)
    else:
        rule = f"must be {LoopMode.ONE_STEP_OFF.value} or {LoopMode.IN_FLIGHT.value} here"
        fix = "set it, or max_off_policy_steps at the launch; speculative_rl trains synchronously"
        require(mode is not LoopMode.SYNCHRONOUS, "loop.mode", rule, mode.value, fix)


def require_arms(recipe: Recipe, arms: Arms) -> None:
    """Refuse a recipe whose engine cannot generate for all of a workflow's arms."""
    is_served = recipe.engine.backend is Backend.VLLM or Arm.SPECULATIVE not in arms.members
    rule, fix = f"must be vllm with --arms {arms.value}", "no speculation was seen on SGLang: set --arms autoregressive"
    require(is_served, "engine.backend", rule, recipe.engine.backend.value, fix)


def handed_on(overrides: Iterable[str]) -> tuple[str, ...]:
    """Overrides for a process in another working directory: their relative paths are made absolute."""
    items = list(overrides)
    given, absolute = parse_overrides(items), absolute_paths(parse_overrides(items), Path.cwd())
    if given == absolute:
        return tuple(items)
    return tuple(f"{name}={json.dumps(value)}" for name, value in leaves(absolute).items())
