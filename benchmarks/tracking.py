"""Cost of tracking, and time of `slipstream compare`: `python -m benchmarks.tracking`. Needs no engine or finished run.

A store of many executions is copied row by row from three real runs (an execution, an arm, another task), without the
history of metrics, which `slipstream compare` does not read.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection, connect

import numpy as np

from slipstream.config import ConfigError, require
from slipstream.recipe import Recipe, load_recipe, parameters
from slipstream.stages.context import RunContext
from slipstream.stages.runs import execution_run, tracked
from slipstream.stages.start_run import start_run
from slipstream.tracking.replay import unsent

_COMPARE_LIMIT_S = 5.0
_COST_LIMIT = 0.01  # fraction of a step
_NUM_REPEATS = 3
_METRICS = {f"train/metric_{number}": 0.5 for number in range(45)}  # about as many as a step logs
_COPIED = ("params", "tags", "latest_metrics")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of tracking for a process that logs steps, in seconds a step."""

    log_s: float  # wait of the loop
    cpu_s: float  # CPU time of all threads, the MLflow thread included


def main(arguments: list[str] | None = None) -> int:
    """Print each figure beside its limit; the limit judges nothing. Status 2 for invalid input."""
    parser = argparse.ArgumentParser(prog="benchmarks.tracking")
    parser.add_argument("--executions", type=int, default=200)
    parser.add_argument("--runs", type=int, default=40, help="runs of each execution, its own included")
    parser.add_argument(
        "--step-s", type=float, default=6.0, help="seconds between two logged steps; 6 as in the tiny recipe"
    )
    parser.add_argument("--num-steps", type=int, default=12)
    options = parser.parse_args(arguments)
    try:
        require(options.executions >= 1, "--executions", "must be >= 1", options.executions)
        require(options.runs >= 4, "--runs", "must be >= 4", options.runs, "an execution, two arms and a task")
        require(options.num_steps >= 1, "--num-steps", "must be >= 1", options.num_steps)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        num_runs = fill_store(root, num_executions=options.executions, runs_per_execution=options.runs)
        compare_s = time_compare(root)
        print(
            f"compare, {options.executions} executions, {num_runs} runs: {compare_s:.2f} s (limit {_COMPARE_LIMIT_S} s)"
        )
        cost = tracking_cost(root, step_s=options.step_s, num_steps=options.num_steps)
    for label, seconds in (("the loop waits", cost.log_s), ("CPU of all threads", cost.cpu_s)):
        share = f"{seconds / options.step_s:.3%} of {options.step_s} s (limit {_COST_LIMIT:.0%})"
        print(f"tracking, {label}: {1e3 * seconds:.2f} ms a step, {share}")
    return 0


def fill_store(root: Path, *, num_executions: int, runs_per_execution: int) -> int:
    """Fill a SQLite store under `root` with executions of the tiny recipe; returns the number of runs."""
    context, path = start_run("tiny", root=root, execution="original", overrides={})
    recipe = load_recipe(str(path))
    _log_original(context, recipe)
    children = runs_per_execution - 1
    with closing(connect(root / "mlflow.db")) as database, database:
        originals = {name: run_id for run_id, name in database.execute("SELECT run_uuid, name FROM runs")}
        for number in range(num_executions - 1):
            _copy(database, originals["original"], f"e{number:031d}", f"copy-{number}")
        for number in range(num_executions * children - 2):
            original = originals["arm" if number % children < 2 else "task"]
            _copy(database, original, f"c{number:031d}", f"child-{number}")
        (num_runs,) = database.execute("SELECT count(*) FROM runs").fetchone()
    return num_runs


def time_compare(root: Path) -> float:
    """Measure the median wall time of the command in seconds, from the start of its process."""
    command = [sys.executable, "-m", "slipstream.cli", "compare", "--run-root", str(root)]
    seconds = []
    for _ in range(_NUM_REPEATS):
        start_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start_s)
    return float(np.median(seconds))


def tracking_cost(root: Path, *, step_s: float, num_steps: int) -> Cost:
    """Log steps at their usual pace with the tiny recipe's tracking, into the store under `root`."""
    recipe = load_recipe("tiny")
    context = RunContext(execution="timed", root=str(root))
    log_s = 0.0
    with tracked(context, recipe, "train", params=parameters(recipe)) as tracker:
        while unsent(root, context.execution, None):  # MLflow connects: once a process, not once a step
            time.sleep(0.1)
        started_cpu_s = time.process_time()
        for step in range(num_steps):
            start_s = time.perf_counter()
            tracker.log(_METRICS, step)
            log_s += time.perf_counter() - start_s
            time.sleep(step_s)
        cpu_s = time.process_time() - started_cpu_s
    return Cost(log_s=log_s / num_steps, cpu_s=cpu_s / num_steps)


def _log_original(context: RunContext, recipe: Recipe) -> None:
    for name, params in (("arm", parameters(recipe)), ("task", {})):
        with tracked(context, recipe, name, params=params) as tracker:
            tracker.log(_METRICS)
    tracker = execution_run(context, recipe)
    tracker.log({**_results(), **{f"result/figure_{number}": 0.5 for number in range(20)}})
    tracker.close()


def _results() -> Mapping[str, float]:
    names = ("generation_speedup", "step_speedup", "reward_difference")
    ends = {f"result/{name}{end}": 1.0 for name in names for end in ("", "_low", "_high")}
    return {**ends, "result/num_speculative_tokens": 3.0, "result/lossless": 1.0}


def _copy(database: Connection, original: str, run_id: str, name: str) -> None:
    """Copy a run with its parameters, tags and last metrics under another id and name."""
    _copy_rows(database, "runs", original, run_id, {"name": name})
    for table in _COPIED:
        _copy_rows(database, table, original, run_id, {})


def _copy_rows(database: Connection, table: str, original: str, run_id: str, changes: Mapping[str, str]) -> None:
    columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    new = {"run_uuid": run_id, **changes}
    chosen = ", ".join("?" if column in new else column for column in columns)
    given = [new[column] for column in columns if column in new]
    into = f"INSERT INTO {table} ({', '.join(columns)})"
    database.execute(f"{into} SELECT {chosen} FROM {table} WHERE run_uuid = ?", [*given, original])


if __name__ == "__main__":
    sys.exit(main())
