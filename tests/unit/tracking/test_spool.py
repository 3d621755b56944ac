"""Spools read without a server: what an execution has cost, worked by hand, and the end of what a process left open."""

from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.tracking.replay import SpoolReplay, replay, unsent
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
    path = spool_path(root, experiment="tiny", key=key)
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


def test_a_replay_sends_a_spool_in_its_order(tmp_path: Path) -> None:
    """A server that refuses points has the name of their run, and does not show it as ended."""

    class Store:
        uri = "fake"

        def __init__(self) -> None:
            self.calls: list[str] = []

        def attach(self, header: RunHeader, **_: Any) -> str:
            return header.key

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: self.calls.append(name)

    path, store = write(tmp_path, "run", is_ended=True), Store()
    assert SpoolReplay(path, cast(Any, store)).advance()
    assert store.calls == ["start", "send_metrics", "end"]


def test_a_replay_brings_the_end_to_the_server(stored_root: Path) -> None:
    from mlflow.tracking import MlflowClient

    write(stored_root, "run/train_grpo", is_ended=False)
    end_open_runs(stored_root, "run", RunStatus.KILLED)
    uri = f"sqlite:///{stored_root}/mlflow.db"
    assert len(unsent(stored_root, "run", uri)) == 1
    replay(stored_root, uri)
    client = MlflowClient(uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert [run.info.status for run in runs] == ["KILLED"]
    assert [unsent(stored_root, "run", each) for each in (uri, None)] == [[], []]
    assert unsent(stored_root, "run", "http://another:5000") == ["run/train_grpo (1 points and 2 other entries)"]


@pytest.mark.parametrize(
    ("runs", "hours", "gpu_hours"),
    [
        # Arms side by side count once in hours, and each in GPU hours.
        ({("data", 0): "0 open, 0.5 end", ("base", 4): "1 open, 3 end", ("spec", 4): "1 open, 2 end"}, 2.5, 12.0),
        # A killed attempt counts to its last point, and the pause before the next one not at all.
        ({("arm", 2): "0 open, 1 metrics, 10 open, 12 end"}, 3.0, 6.0),
        ({("report", 0): "19 open"}, 1.0, 0.0),  # what goes on counts until now
        (
            {("", 0): "0 open, 9 end", ("../run-2/arm", 8): "0 open, 9 end"},
            0.0,
            0.0,
        ),  # the execution's own, and another
    ],
)
def test_hours_count_what_runs_once_and_gpu_hours_each_arm_without_pauses_until_now(
    tmp_path: Path, runs: dict[tuple[str, int], str], hours: float, gpu_hours: float
) -> None:
    for (name, num_gpus), events in runs.items():
        key = f"run/{name}".rstrip("/").removeprefix("run/../")
        header = RunHeader(experiment="tiny", key=key, name=key, tags={GPUS_TAG: str(num_gpus)})
        file = Spool(spool_directory(tmp_path) / f"{key.replace('/', '-')}.jsonl")
        for hour, kind in (event.split() for event in events.split(", ")):
            opened: Any = {"kind": kind, "header": header if kind == "open" else None}
            file.append(Event(time_ms=int(float(hour) * HOUR_MS), **opened))
        file.close()
    assert spent(tmp_path, "run", now_ms=20 * HOUR_MS) == pytest.approx((hours, gpu_hours))
