"""Commands `slipstream run` and `slipstream demo`: start or resume one execution of a recipe's chain on this machine.

`slipstream demo` is `slipstream run tiny --arms both`. The workflow runs in a process of its own, like under
`pyflyte run`. This process stays small, so it can answer an interrupt at any moment, and prints at the end how to
resume.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import ConfigError, require
from slipstream.kubernetes.profile import CLUSTER_VARIABLE
from slipstream.recipe import CONFIGS, Recipe, load_recipe, recipe_path
from slipstream.records.files import read_record
from slipstream.records.run import RunRecord
from slipstream.refit.channel import discard_transfers
from slipstream.stages.context import (
    EXECUTION_VARIABLE,
    add_inputs,
    add_set,
    handed_on,
    is_finished,
    new_execution,
    recorded_arms,
    recorded_recipe,
    requested,
)
from slipstream.supervisor import Outcome, supervise
from slipstream.tracking.config import store_uri
from slipstream.tracking.replay import replay_command, unsent
from slipstream.tracking.spool import RunStatus, end_open_runs
from slipstream.types import Arms
from slipstream.workers.forked_workers import forked_workers
from slipstream.workers.placement.config import ArmsInTurn

LATEST = ""
"""Value of `--resume` without a name: the latest execution without a report."""

_DEMO = "tiny"
_REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "FLYTE_LOCAL_CACHE_ENABLED": "false",  # cached tasks would report an old run's times
    "MKL_CBWR": "AUTO,STRICT",  # products of equal bits on any number of threads
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PYTHONDONTWRITEBYTECODE": "",  # otherwise each process compiles all its imports again: scripts/env
    "PYTHONWARNINGS": "ignore",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_get_check_signal_interval_milliseconds": "200",  # delay until a wait for an engine notices an interrupt
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Execution and inputs that a workflow is started with."""

    workflow: str
    execution: str
    inputs: Mapping[str, Any]  # None for an input that was not given, which keeps the recipe's value
    reuse_stored: bool = True

    def command(self, root: Path) -> list[str]:
        """Return the command line of `pyflyte run` with the workflow's inputs."""
        pyflyte = Path(sys.executable).with_name("pyflyte")
        command = [str(pyflyte), "run", f"workflows/{self.workflow}.py", self.workflow]
        for name, value in {**self.inputs, "run_root": root}.items():
            if value is not None:
                command += [f"--{name}", json.dumps(value) if isinstance(value, list | tuple) else str(value)]
        return [*command, "--reuse_stored" if self.reuse_stored else "--no_reuse_stored"]


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands `run` and `demo`, which share their options."""
    words = "train a recipe on this machine: data, policy, draft, draft length, GRPO, certificate, evaluation, report"
    chain = commands.add_parser("run", help=words, description=f"{words[0].upper()}{words[1:]}.")
    chain.add_argument("recipe", nargs="?", help="a name in configs/, such as tiny, or a path to a recipe")
    words = f"arms to train: {', '.join(Arms)}; one arm alone has no baseline, and so no speedup; "
    words += f"default: {Arms.SPECULATIVE.value}"
    chain.add_argument("--arms", metavar="ARMS", help=words)
    _add_options(chain)
    words = f"run {_DEMO} --arms both: the whole chain with and without speculation, and the speedup"
    chain = commands.add_parser("demo", help=words, description=f"The command `slipstream {words}`.")
    chain.add_argument("--recipe", help=f"a name in configs/ or a path; default: {_DEMO}")
    _add_options(chain)
    chain.set_defaults(default_recipe=_DEMO, arms=None, default_arms=Arms.BOTH)


def _add_options(chain: argparse.ArgumentParser) -> None:
    add_inputs(chain)
    words = "alternate the steps of both arms, so that machine load affects both alike; default: the recipe's"
    chain.add_argument("--arms-in-turn", choices=list(ArmsInTurn), type=ArmsInTurn, help=words)
    add_set(chain)
    chain.add_argument("--run-root", default="runs", help="directory of executions, store and tracking; default: runs")
    words = "resume an execution with its recorded recipe and arms; default: the latest without a report"
    chain.add_argument("--resume", nargs="?", const=LATEST, metavar="EXECUTION", help=words)
    words = "make data, policy and draft again, even if they are stored"
    chain.add_argument("--fresh", action="store_true", help=words)
    chain.set_defaults(run=_run, default_recipe="", default_arms=Arms.SPECULATIVE)


def _run(options: argparse.Namespace) -> int:
    """Run the workflow of the recipe's loop through `pyflyte run`, and print the table of the report."""
    root = Path(options.run_root).resolve()
    if options.resume is not None:
        for name in ("recipe", "arms", "workload", "num_steps", "seed", "arms_in_turn", "set"):
            is_positional = name == "recipe" and not options.default_recipe
            value, flag = getattr(options, name), name if is_positional else f"--{name.replace('_', '-')}"
            fix = "an execution resumes with its recorded recipe and arms"
            require(value in (None, []), flag, "must be left out with --resume", value, fix)
        launch = resumed(root, options.resume, reuse_stored=not options.fresh)
    else:
        in_turn, arms = options.arms_in_turn, options.arms
        require(arms in (None, *Arms), "--arms", f"must be one of {', '.join(Arms)}", arms)
        launch = started(
            options.recipe or options.default_recipe,
            arms=Arms(arms or options.default_arms),
            workload=options.workload,
            num_steps=options.num_steps,
            seed=options.seed,
            overrides=[*options.set, *([] if in_turn is None else [f"placement.arms_in_turn={in_turn}"])],
            reuse_stored=not options.fresh,
        )
    status = run(launch, root)
    if status == 0:
        _show(root)
    return status


def _show(root: Path) -> None:
    from slipstream.report.results import terminal_table

    latest = root / "latest"
    record = read_record(RunRecord, latest / "run.json")
    print()
    print(terminal_table(record))
    print(f"\nreport: {latest / 'report.html'}")
    print(f"MLflow: .venv/bin/mlflow ui --host 127.0.0.1 --backend-store-uri {shlex.quote(record.tracking_uri)}")


def handed_on_recipe(recipe: str) -> str:
    """Return a recipe's name, or the absolute path of its file, for a process in another directory."""
    return recipe if recipe_path(recipe).parent == CONFIGS else os.path.abspath(recipe)


def run(launch: Launch, root: Path) -> int:
    """Run the launched workflow to its end, say how to resume it and what MLflow lacks, and return the exit status."""
    path = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH"))))
    execution = launch.execution
    own = {**ENVIRONMENT, "PYTHONPATH": path, EXECUTION_VARIABLE: execution}
    profile = os.environ.get(CLUSTER_VARIABLE, "")
    if Path(profile).is_file():
        own[CLUSTER_VARIABLE] = os.path.abspath(profile)
    with _claimed(root, execution), forked_workers():
        outcome = supervise(launch.command(root), cwd=_REPOSITORY, environment={**os.environ, **own})
        discard_transfers(outcome.pid)
        if outcome.status:
            end_open_runs(root, execution, RunStatus.KILLED if outcome.interrupted else RunStatus.FAILED)
    if words := _last_words(execution, root, outcome):
        print(words, file=sys.stderr, flush=True)
    return outcome.status


def resumed(root: Path, execution: str, *, reuse_stored: bool) -> Launch:
    """Build the launch that resumes `execution`, which has no report yet, with its recorded recipe and arms."""
    recipes = sorted(root.glob("*/start_run/recipe.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    names = [path.parents[1].name for path in recipes]
    unfinished = [name for name in names if not is_finished(root, name) and not _starts_anew(root, name)]
    name = execution or next(iter(unfinished), "")
    rule = f"must name an execution under {root} that has no report yet"
    known = ", ".join(unfinished) or "none"
    require(name in unfinished, "--resume", rule, execution or "the latest", f"known: {known}")
    path = str(recorded_recipe(root, name))
    inputs = {"recipe": path, "arms": recorded_arms(root, name), "resume_execution": name}
    return Launch(workflow=_workflow_of(load_recipe(path)), execution=name, inputs=inputs, reuse_stored=reuse_stored)


def started(recipe: str, *, reuse_stored: bool, arms: Arms, overrides: Sequence[str] = (), **inputs: Any) -> Launch:
    """Build the launch of a new execution; an input of None keeps the recipe's value.

    Args:
        overrides: changes of the recipe, as in `grpo.group_size=16`.
        inputs: `workload`, `num_steps` and `seed`.
    """
    overrides = handed_on(overrides)
    loaded = load_recipe(recipe, overrides=requested(overrides, **inputs))
    return Launch(
        workflow=_workflow_of(loaded),
        execution=new_execution(recipe),
        inputs={"recipe": handed_on_recipe(recipe), "arms": arms, "overrides": overrides or None, **inputs},
        reuse_stored=reuse_stored,
    )


def _workflow_of(recipe: Recipe) -> str:
    return "speculative_rl" if recipe.loop.is_synchronous else "asynchronous_rl"


def _starts_anew(root: Path, execution: str) -> bool:
    """Return True for a study or a certificate alone, which starts anew instead of resuming."""
    begun = {path.name for path in (root / execution).glob("*")}
    is_certificate = "certify_losslessness" in begun and "prepare_policy" not in begun
    return is_certificate or not begun.isdisjoint({"plan_ablation", "bake_off"})


@contextmanager
def _claimed(root: Path, execution: str) -> Iterator[None]:
    """Hold a lock on the execution, so that no second process resumes it while it runs."""
    directory = root / execution
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
    except OSError as error:
        rule = "must be a directory that can be written"
        raise ConfigError(f"--run-root {rule}, got {str(root)!r} ({error.strerror}); name another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "wait for it, or interrupt it"
            raise ConfigError(f"execution must not be running already, got {execution!r}; {fix}") from error
        yield


def _last_words(execution: str, root: Path, outcome: Outcome) -> str:
    """Say which MLflow runs are incomplete, and how to resume an interrupted or failed execution."""
    what = "interrupted" if outcome.interrupted else f"failed with status {outcome.status}"
    lines = []
    recorded = recorded_recipe(root, execution)
    tracking = load_recipe(str(recorded)).tracking if recorded.is_file() else None  # None: a study, or none began
    if waiting := unsent(root, execution, tracking and store_uri(tracking, root)):
        replay = replay_command(root, tracking and tracking.uri, program=_slipstream())
        when = "when you resume, or by" if outcome.status else "by"
        lines.append(f"{len(waiting)} MLflow run(s) are not up to date: {', '.join(waiting)}")
        lines.append(f"they are completed {when}: {replay}")
    if not outcome.status:
        return "\n".join(lines)
    if _starts_anew(root, execution):
        lines.append(f"{what}; the same command starts again, with policies and drafts from {root / 'store'}")
    elif recorded.is_file():
        resume = shlex.join([*_slipstream(), "run", "--run-root", str(root), "--resume", execution])
        lines.append(f"{what}; resume with: {resume}")
    else:
        lines.append(f"{what} before its recipe was recorded; start again with the same command")
    return "\n".join(lines)


def _slipstream() -> list[str]:
    """Return the command as a user can type it."""
    script = Path(sys.executable).with_name("slipstream")
    if not script.is_file():
        return [sys.executable, "-m", "slipstream.cli"]
    is_below = script.is_relative_to(Path.cwd())
    return [str(script.relative_to(Path.cwd()) if is_below else script)]
