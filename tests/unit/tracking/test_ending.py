"""What a killed process left open is ended in its spool, and a replay brings it to the server."""

from __future__ import annotations

from pathlib import Path

from slipstream.tracking import RunStatus, end_open_runs, replay, unsent
from slipstream.tracking.spool import Event, RunHeader, Spool, read_spool, spool_path


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
