"""Spools read without a server: what an execution has cost, worked by hand, and the end of what a process left open."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.tracking.replay import replay, unsent
from slipstream.tracking.spool import (
    GPUS_TAG,
    Event,
    RunHeader,
    RunStatus,
    Spool,
    end_open_runs,
    read_spool,
    spent,
    spool_directory,
    spool_path,
)

HOUR_MS = 3_600_000


def write(root: Path, key: str, *, is_ended: bool, torn: bool = False) -> Path:
    path = spool_path(root / "spool", experiment="tiny", key=key)
    spool = Spool(path)
    spool.append(Event(kind="open", time_ms=1000, header=RunHeader(experiment="tiny", key=key, name=key)))
    spool.append(Event(kind="metrics", time_ms=1001, metrics={"train/loss": 1.0}))
    if is_ended:
        spool.append(Event(kind="end", time_ms=1002, status="FINISHED"))
    spool.close()
    if torn:
        with path.open("ab") as file:
            file.write(b'{"kind":"metr')
    return path


def test_open_runs_of_the_execution_are_ended_and_no_other(tmp_path: Path) -> None:
    ended = write(tmp_path, "run/prepare_data", is_ended=True)
    torn = write(tmp_path, "run/train_grpo", is_ended=False, torn=True)
    other = write(tmp_path, "run-2", is_ended=False)
    before = ended.read_bytes(), other.read_bytes()
    write(tmp_path, "run", is_ended=False)

    assert sorted(end_open_runs(tmp_path, "run", RunStatus.KILLED)) == ["run", "run/train_grpo"]

    assert (ended.read_bytes(), other.read_bytes()) == before
    last = read_spool(torn).events[-1]
    assert (last.kind, last.status) == ("end", "KILLED")
    assert end_open_runs(tmp_path, "run", RunStatus.KILLED) == []


def test_a_replay_brings_the_end_to_the_server(stored_root: Path) -> None:
    from mlflow.tracking import MlflowClient

    write(stored_root, "run/train_grpo", is_ended=False)
    end_open_runs(stored_root, "run", RunStatus.KILLED)
    assert len(unsent(stored_root, "run")) == 1
    uri = f"sqlite:///{stored_root}/mlflow.db"

    replay(stored_root / "spool", uri)

    client = MlflowClient(uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert [run.info.status for run in runs] == ["KILLED"]
    assert unsent(stored_root, "run") == []


def spool(root: Path, key: str, *events: tuple[float, str], num_gpus: int = 0) -> None:
    """Events of (hour, kind)."""
    header = RunHeader(experiment="tiny", key=key, name=key, tags={GPUS_TAG: str(num_gpus)})
    file = Spool(spool_directory(root) / f"{key.replace('/', '-')}.jsonl")
    for hour, kind in events:
        opened = header if kind == "open" else None
        file.append(Event(kind=kind, time_ms=int(hour * HOUR_MS), header=opened))  # type: ignore[arg-type]
    file.close()


def test_arms_side_by_side_count_once_in_hours_and_each_in_gpu_hours(tmp_path: Path) -> None:
    spool(tmp_path, "run/data", (0.0, "open"), (0.5, "end"))
    spool(tmp_path, "run/base", (1.0, "open"), (3.0, "end"), num_gpus=4)
    spool(tmp_path, "run/spec", (1.0, "open"), (2.0, "end"), num_gpus=4)
    cost = spent(tmp_path, "run", now_ms=9 * HOUR_MS)
    assert cost.hours == pytest.approx(0.5 + 2.0)
    assert cost.gpu_hours == pytest.approx(4 * 2.0 + 4 * 1.0)


def test_a_killed_attempt_counts_to_its_last_point_and_the_pause_before_the_next_not_at_all(tmp_path: Path) -> None:
    spool(tmp_path, "run/arm", (0.0, "open"), (1.0, "metrics"), (10.0, "open"), (12.0, "end"), num_gpus=2)
    cost = spent(tmp_path, "run", now_ms=20 * HOUR_MS)
    assert cost.hours == pytest.approx(1.0 + 2.0)
    assert cost.gpu_hours == pytest.approx(6.0)


def test_what_goes_on_counts_until_now(tmp_path: Path) -> None:
    spool(tmp_path, "run/report", (2.0, "open"))
    assert spent(tmp_path, "run", now_ms=3 * HOUR_MS).hours == pytest.approx(1.0)


def test_the_executions_own_run_and_other_executions_are_left_out(tmp_path: Path) -> None:
    spool(tmp_path, "run", (0.0, "open"), (9.0, "end"))
    spool(tmp_path, "run-2/arm", (0.0, "open"), (9.0, "end"), num_gpus=8)
    cost = spent(tmp_path, "run", now_ms=9 * HOUR_MS)
    assert (cost.hours, cost.gpu_hours) == (0.0, 0.0)
