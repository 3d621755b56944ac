"""How long `slipstream compare` takes on a store of many executions: `python -m benchmarks.compare`.

The store is MLflow's own schema, filled by bulk inserts: through MLflow's client it would take an hour.
"""

from __future__ import annotations

import argparse
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.recipe import load_recipe, parameters
from slipstream.tracking.config import EXECUTION, KIND_TAG

_NUM_TASK_METRICS = 25
_RESULTS = (
    "generation_speedup",
    "generation_speedup_low",
    "generation_speedup_high",
    "step_speedup",
    "step_speedup_low",
    "step_speedup_high",
    "reward_autoregressive",
    "reward_speculative",
    "reward_difference",
    "reward_difference_low",
    "reward_difference_high",
    "mean_acceptance_length",
    "num_speculative_tokens",
    "lossless",
    "hours",
    "gpu_hours",
)


def main() -> None:
    """Fill a store and time the command, in a process of its own as a user starts it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=200)
    parser.add_argument("--runs", type=int, default=40, help="an execution, itself among them")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "mlflow.db"
        fill(path, num_executions=options.executions, num_runs=options.runs)
        size_mb = path.stat().st_size / 1e6
        print(f"store: {options.executions} executions x {options.runs} runs, {size_mb:.0f} MB")
        for arguments in (["--experiment", "tiny"], ["--runs", "run-1", f"run-{options.executions}"]):
            times = [_time(path, arguments) for _ in range(options.repeats)]
            print(f"compare {' '.join(arguments)}: {' '.join(f'{seconds:.2f}' for seconds in times)} s")


def fill(path: Path, *, num_executions: int, num_runs: int) -> None:
    """Create MLflow's tables in `path` and put executions with their tasks' runs into them."""
    from slipstream.tracking.mlflow_store import MlflowStore
    from slipstream.tracking.spool import RunHeader

    store = MlflowStore(f"sqlite:///{path}", request_timeout_s=60)
    header = RunHeader(experiment="tiny", key="template", name="template")
    template = store.attach(header, start_ms=0)
    recipe = parameters(load_recipe("tiny"))
    database = sqlite3.connect(path)
    columns = [row[1] for row in database.execute("PRAGMA table_info(runs)")]
    row = database.execute("SELECT * FROM runs WHERE run_uuid = ?", (template,)).fetchone()
    run = dict(zip(columns, row, strict=True))
    with database:
        for index in range(1, num_executions + 1):
            for values in _runs(index, num_runs, recipe):
                _insert(database, {**run, **values.row}, values)
    database.close()
    store.end(template, status="KILLED", time_ms=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What is inserted for one run."""

    row: dict[str, object]
    tags: dict[str, str]
    params: dict[str, str]
    metrics: list[str]


def _runs(index: int, num_runs: int, recipe: dict[str, str]) -> Iterator[_Run]:
    """One execution's own run, two arms with all parameters, and tasks with a few."""
    results = [f"result/{name}" for name in _RESULTS]
    own = {KIND_TAG: EXECUTION, "slipstream.key": f"run-{index}", "git.commit": "0123456789ab", "node": "n"}
    yield _Run(row=_row(f"run-{index}", index), tags=own, params={**recipe, "grpo.seed": str(index)}, metrics=results)
    for task in range(1, num_runs):
        name = f"run-{index} task {task}"
        params = recipe if task <= 2 else {"k": "3"}
        metrics = [f"area/metric_{number}" for number in range(_NUM_TASK_METRICS)]
        yield _Run(row=_row(name, index), tags={"slipstream.key": name}, params=params, metrics=metrics)


def _row(name: str, index: int) -> dict[str, object]:
    return {"run_uuid": uuid.uuid4().hex, "name": name, "status": "FINISHED", "start_time": 1_000_000 * index}


def _insert(database: sqlite3.Connection, run: dict[str, object], values: _Run) -> None:
    id_ = run["run_uuid"]
    marks = ", ".join("?" * len(run))
    database.execute(f"INSERT INTO runs ({', '.join(run)}) VALUES ({marks})", list(run.values()))
    for table, fields in (("tags", values.tags), ("params", values.params)):
        rows = [(key, value, id_) for key, value in fields.items()]
        database.executemany(f"INSERT INTO {table} (key, value, run_uuid) VALUES (?, ?, ?)", rows)
    database.executemany(
        "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, 1.5, 0, 0, 0, ?)",
        [(name, id_) for name in values.metrics],
    )


def _time(path: Path, arguments: list[str]) -> float:
    page = path.with_name("page.html")
    command = [sys.executable, "-m", "slipstream.cli", "compare", "--uri", f"sqlite:///{path}", "--html", str(page)]
    start = time.perf_counter()
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
