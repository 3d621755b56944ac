"""Who a task works for: the one value that travels from `start_run` to every other task."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from slipstream.types import Arm, ArmLoop, arm_name

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
