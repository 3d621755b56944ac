"""Tracking against the real MLflow on SQLite, and against servers that refuse or hang."""

import logging
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config import ConfigError
from slipstream.tracking.config import EXECUTION, KIND_TAG, TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import open_store, read_executions
from slipstream.tracking.replay import SpoolReplay, replay, unsent
from slipstream.tracking.spool import RunStatus, Spool, read_events, spool_directory
from slipstream.tracking.tracker import Tracker, _ReplayThread
from tests.unit.conftest import Command

DEAD = "http://127.0.0.1:9"
LOCAL = TrackingConfig(replay_every_s=0.1)
UNREACHABLE = TrackingConfig(uri=DEAD, replay_every_s=0.1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[[Path], Path]) -> Path:
    """One SQLite store for the file. Tests differ by key."""
    return make_store(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def client(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(store_uri(LOCAL, root))


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def find_run(client: Any, key: str) -> Any:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, filter_string=f"tags.`slipstream.key` = '{key}'")
    assert len(runs) == 1
    return runs[0]


def history(client: Any, run: Any, metric: str) -> list[tuple[int, int, float]]:
    return sorted((m.step, m.timestamp, m.value) for m in client.get_metric_history(run.info.run_id, metric))


def points(client: Any, run: Any, metric: str) -> list[tuple[int, float]]:
    return [(step, value) for step, _, value in history(client, run, metric)]


def spooled(root: Path, metric: str) -> list[tuple[int, int, float]]:
    events = [event for path in spool_directory(root).glob("*.jsonl") for event in read_events(path)]
    return sorted((each.step, each.time_ms, each.metrics[metric]) for each in events if metric in each.metrics)


def lose(root: Path, key: str, loss: float, *, step: int) -> None:
    """Log a point for a server that is away."""
    tracker = Tracker(UNREACHABLE, root=root, experiment="tiny", key=key, name="x")
    tracker.log({"train/loss": loss}, step=step)
    tracker.detach()


def test_a_run_arrives_with_all_that_was_logged(root: Path, client: Any, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("<p>fast</p>")
    where = {"root": root, "experiment": "tiny"}
    below = {"parent_key": "e1", "tags": {"arm": "speculative"}}
    with (
        Tracker(LOCAL, **where, key="e1", name="execution", tags={"arm": "none"}, params={"k": 3}),
        Tracker(LOCAL, **where, key="e1/train", name="train", **below) as tracker,
    ):
        tracker.log({"train/reward": 0.25, "time/step_s": 4.0}, step=0)
        tracker.log({"train/reward": 0.75, "time/step_s": 2.0}, step=1)
        tracker.log_params({"group_size": 8})
        tracker.set_tags({"draft.method": "eagle3"})
        tracker.log_artifact(page)
        page.unlink()
    run, top = find_run(client, "e1/train"), find_run(client, "e1")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "train")
    assert run.data.tags["mlflow.parentRunId"] == top.info.run_id
    assert (run.data.tags["arm"], run.data.tags["draft.method"]) == ("speculative", "eagle3")
    assert (run.data.params, top.data.params) == ({"group_size": "8"}, {"k": "3"})
    assert points(client, run, "train/reward") == [(0, 0.25), (1, 0.75)]
    summaries = {name: value for name, value in run.data.metrics.items() if name.startswith(("best/", "mean/"))}
    assert summaries == {"best/reward": 0.75, "mean/reward": 0.5, "best/step_s": 2.0, "mean/step_s": 3.0}
    artifact = root / "artifacts" / run.info.run_id / "artifacts" / "report.html"
    assert artifact.read_text() == "<p>fast</p>"


def test_a_retried_task_gets_the_same_run_and_its_summaries_cover_both_attempts(root: Path, client: Any) -> None:
    first = Tracker(LOCAL, root=root, experiment="tiny", key="e2/n0", name="train", params={"seed": 1, "host": 1})
    first.log({"train/reward": 0.9}, step=0)
    first.log({"train/reward": 0.8}, step=1)
    first.close(RunStatus.FAILED)
    failed = find_run(client, "e2/n0").info
    assert failed.status == "FAILED"
    again = Tracker(LOCAL, root=root, experiment="tiny", key="e2/n0", name="train", params={"seed": 1, "host": 2})
    again.log({"train/reward": 0.3}, step=1)  # repeated after the checkpoint
    again.close()
    run = find_run(client, "e2/n0")
    assert (run.info.run_id, run.info.status) == (failed.run_id, "FINISHED")
    assert run.data.params == {"seed": "1", "host": "1"}
    assert run.data.tags["changed.host"] == "2"
    # In the summaries step 1 counts once, with its later value: the mean of 0.9 and 0.3.
    assert (run.data.metrics["best/reward"], run.data.metrics["mean/reward"]) == (0.9, pytest.approx(0.6))


def test_a_repeated_step_is_one_point_and_a_result_the_last_attempts(root: Path, client: Any) -> None:
    """Each attempt starts anew where it finds the cursor; the second replay sends the whole spool at once."""
    for rewards in ({0: 0.9, 1: 0.8}, {1: 0.3, 2: 0.4}, {1: 0.2, 2: 0.5, 3: 0.6}):
        with Tracker(LOCAL, root=root, experiment="tiny", key="e7/n0", name="train") as tracker:
            for step, reward in rewards.items():
                tracker.log({"train/reward": reward}, step=step)
            tracker.log({"result/reward": rewards[max(rewards)]})
    expected = [(0, 0.9), (1, 0.8), (2, 0.4), (3, 0.6)]
    run = find_run(client, "e7/n0")
    assert points(client, run, "train/reward") == expected
    assert run.data.metrics["result/reward"] == 0.6
    from mlflow.tracking import MlflowClient

    elsewhere = f"sqlite:///{root / 'elsewhere.db'}"
    replay(root, elsewhere)
    copied = MlflowClient(elsewhere)
    run = find_run(copied, "e7/n0")
    assert points(copied, run, "train/reward") == expected
    assert run.data.metrics["result/reward"] == 0.6


def test_a_detached_run_goes_on_and_an_exception_ends_one_as_failed(root: Path, client: Any) -> None:
    Tracker(LOCAL, root=root, experiment="tiny", key="e3", name="execution").detach()
    assert find_run(client, "e3").info.status == "RUNNING"
    with pytest.raises(ZeroDivisionError), Tracker(LOCAL, root=root, experiment="tiny", key="e4", name="x"):
        _ = 1 / 0
    assert find_run(client, "e4").info.status == "FAILED"


def test_a_refusing_server_costs_no_point_and_replay_duplicates_none(
    tmp_path: Path, root: Path, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "slipstream.tracking"):
        tracker = Tracker(UNREACHABLE, root=tmp_path, experiment="tiny", key="e5/n0", name="x", parent_key="e5")
        for step in range(50):
            tracker.log({"time/step_s": 1.0 + step}, step=step)
        time.sleep(0.5)  # several vain attempts
        tracker.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2  # once when it failed, once at the end
    assert DEAD in warnings[0] and "training goes on" in warnings[0] and str(spool_directory(tmp_path)) in warnings[0]
    what, command = "52 points and 2 other entries have not reached", f"slipstream replay {tmp_path} --uri {DEAD}"
    assert warnings[1].startswith(f"{what} {DEAD} (tracking server {DEAD}: ") and "Connection refused" in warnings[1]
    assert warnings[1].endswith(f"and this brings them: {command}")

    uri = store_uri(LOCAL, root)
    sent = replay(tmp_path, uri)
    assert (sent.num_runs, sent.num_points, sent.num_broken_lines) == (1, 52, 0)
    assert replay(tmp_path, uri).num_points == 0
    for cursor in spool_directory(tmp_path).glob("*.cursor"):
        cursor.unlink()  # as if the first replay had died before it noted how far it came
    assert replay(tmp_path, uri).num_points == 52
    run = find_run(client, "e5/n0")
    logged = history(client, run, "time/step_s")
    assert logged == spooled(tmp_path, "time/step_s")
    assert [(step, value) for step, _, value in logged] == [(step, 1.0 + step) for step in range(50)]
    assert run.info.status == "FINISHED"
    assert run.info.start_time <= logged[0][1]
    assert run.data.tags["mlflow.parentRunId"] == find_run(client, "e5").info.run_id


def test_whatever_fails_is_tried_again(
    root: Path, client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OverflowError("no TrackingError"), OSError("disk full"), sqlite3.OperationalError("database is locked")]
    advance = SpoolReplay.advance

    def fails_at_first(replayed: SpoolReplay) -> bool:
        if failures:
            raise failures.pop(0)
        return advance(replayed)

    monkeypatch.setattr(SpoolReplay, "advance", fails_at_first)
    tracker = Tracker(LOCAL, root=root, experiment="tiny", key="e14", name="x")
    tracker.log({"train/loss": 1.0}, step=0)
    tracker.close()  # at once: the first failures may be those of the last tries
    assert "OverflowError: no TrackingError; training goes on" in caplog.text
    assert find_run(client, "e14").info.status == "FINISHED"


def test_a_failure_of_a_whole_day_is_still_tried_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool" / "x.jsonl")
    thread = _ReplayThread(spool, uri=DEAD, config=TrackingConfig(), command="")
    for thread._num_failures, pause_s in ((0, 5.0), (1, 10.0), (2, 20.0), (4, 60.0), (2000, 60.0)):
        assert thread._pause_s() == pause_s
    spool.close()


TWO_RUNS = """
import sys
from pathlib import Path
from slipstream.tracking.config import TrackingConfig
from slipstream.tracking.tracker import Tracker
from slipstream.tracking.mlflow_store import import_mlflow
import_mlflow(10)
import mlflow.store.tracking.sqlalchemy_store
print("ready", flush=True)
sys.stdin.readline()
with Tracker(TrackingConfig(), root=Path(sys.argv[1]), experiment="tiny", key=sys.argv[2], name="x") as tracker:
    tracker.log({"train/loss": 1.0}, step=0)
"""


@pytest.mark.slow
def test_two_executions_that_start_at_once_on_a_fresh_root_both_arrive(tmp_path: Path) -> None:
    """Also where a killed process left the tables half made."""
    with sqlite3.connect(tmp_path / "mlflow.db.new") as half:
        half.execute("CREATE TABLE experiments (experiment_id INTEGER)")
    keys = ("first", "second")
    commands = [[sys.executable, "-c", TWO_RUNS, str(tmp_path), key] for key in keys]
    runs = [subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for each in commands]
    assert [run.stdout.readline() for run in runs if run.stdout] == ["ready\n"] * 2
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("\n")
        run.stdin.flush()
    assert [run.wait(60) for run in runs] == [0, 0]
    for run in runs:
        run.communicate()
    assert [unsent(tmp_path, key, None) for key in keys] == [[], []]
    (name,) = set(open_store(store_uri(LOCAL, tmp_path)).experiments().values()) - {"Default"}
    assert name == "tiny"
    assert not (tmp_path / "mlflow.db.new").exists()


def test_a_root_of_any_name_holds_its_store_and_gives_everything_back(tmp_path: Path) -> None:
    root = tmp_path / "feature%2Fx ?a=1 #b 100% [c] ü 'd"
    page = root / "report.html"
    root.mkdir()
    page.write_text("fast")
    tags = {KIND_TAG: EXECUTION}
    with Tracker(LOCAL, root=root, experiment="tiny", key="e16", name="e16", tags=tags) as tracker:
        tracker.log({"result/hours": 2.0})
        tracker.log_artifact(page)
    uri = store_uri(LOCAL, root)
    assert [(run.name, run.metrics) for run in read_executions(uri)] == [("e16", {"result/hours": 2.0})]
    copy = tmp_path / "copy"
    copy.mkdir()
    assert open_store(uri).fetch_artifact("e16", "report.html", copy).read_text() == "fast"
    assert replay(root, uri).num_points == 0
    assert {path.name for path in tmp_path.iterdir()} == {root.name, "copy"}
    assert {"mlflow.db", "artifacts", "spool"} <= {path.name for path in root.iterdir()}


def test_points_of_a_failed_server_arrive_with_the_next_attempt(root: Path, client: Any) -> None:
    lose(root, "e6", 1.0, step=0)
    with Tracker(LOCAL, root=root, experiment="tiny", key="e6", name="x") as found:
        found.log({"train/loss": 2.0}, step=1)
    assert points(client, find_run(client, "e6"), "train/loss") == [(0, 1.0), (1, 2.0)]


def test_a_server_that_hangs_does_not_slow_the_loop(tmp_path: Path, silent_server: str) -> None:
    config = TrackingConfig(uri=silent_server, replay_every_s=0.1, close_wait_s=0.5)
    tracker = Tracker(config, root=tmp_path, experiment="tiny", key="e7", name="x")
    start = time.perf_counter()
    for step in range(1000):
        tracker.log({"time/step_s": 1.0, "train/reward": 0.5}, step=step)
    assert time.perf_counter() - start < 1.0
    start = time.perf_counter()
    tracker.close()
    assert time.perf_counter() - start < 3.0
    assert len(spooled(tmp_path, "train/reward")) == 1000


def test_a_dead_server_is_one_line_within_seconds(tmp_path: Path, command: Command) -> None:
    for key in ("e8", "e8/a", "e8/b"):
        Tracker(UNREACHABLE, root=tmp_path, experiment="tiny", key=key, name="x").close()
    start = time.perf_counter()
    said = command("replay", tmp_path, "--uri", DEAD, status=1)
    assert time.perf_counter() - start < 5.0
    (line,) = [each for each in said.splitlines() if each.startswith("error: ")]
    assert line.startswith(f"error: nothing more was sent: tracking server {DEAD}: ")


def test_a_root_without_spools_is_refused_and_nothing_is_made_there(tmp_path: Path, command: Command) -> None:
    empty, mistyped = tmp_path / "empty", tmp_path / "mistyped"
    empty.mkdir()
    no_root = f"error: run root must be a directory, got '{mistyped}'\n"
    assert command("replay", mistyped, status=2) == no_root
    no_spool = f"error: run root must hold spools of runs, got '{empty}'; {empty / 'spool'} has none\n"
    assert command("replay", empty, status=2) == no_spool
    no_server = "tracking.uri must name a server or be null, got 'localhost:5000'"
    assert no_server in command("replay", empty, "--uri", "localhost:5000", status=2)
    assert list(tmp_path.iterdir()) == [empty] and list(empty.iterdir()) == []


def test_replay_sends_all_but_what_the_server_refuses_and_names_that(
    stored_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store_uri(LOCAL, stored_root))
    page = stored_root / "report.html"
    page.write_text("fast")
    lost = "deleted", client.create_experiment("deleted")
    client.delete_experiment(lost[1])
    keys = {"a": "deleted", "b": "tiny", "c": "tiny", "d": "tiny"}
    for key, experiment in keys.items():
        tracker = Tracker(UNREACHABLE, root=stored_root, experiment=experiment, key=key, name=key)
        if key == "c":
            tracker.log_artifact(page)
        tracker.log({"train/loss": 1.0}, step=0)
        tracker.detach()
    (copy,) = stored_root.glob("spool/c-*.artifacts/report.html")
    copy.rename(stored_root / "moved.html")
    (stored_root / "spool" / "e-.jsonl").write_text('{"kind":"metrics","time_ms":1,"metrics":{"train/loss":1.0}}\n')
    gone = client.create_run(client.create_experiment("tiny"), tags={"slipstream.key": "b"})
    client.delete_run(gone.info.run_id)
    capsys.readouterr()

    assert main(["replay", str(stored_root)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("1 run(s) are whole on ") and "; 2 points were sent now" in out  # those of c and d
    refused = [line for line in err.splitlines() if line.startswith("error: ")]
    assert [Path(line.split()[1]).name[:2] for line in refused] == ["a-", "b-", "c-", "e-"]
    uri = f"MLFLOW_TRACKING_URI={store_uri(LOCAL, stored_root)}"
    assert refused[0].endswith(f"restore it with: {uri} mlflow experiments restore --experiment-id {lost[1]}")
    assert refused[1].endswith(f"restore it with: {uri} mlflow runs restore --run-id {gone.info.run_id}")
    assert refused[2].endswith(f"has not arrived: all has arrived but files that are gone: {copy}; put them back")
    assert refused[3].endswith("no line of it says which run it is of")
    assert unsent(stored_root, "c", None) == ["c (0 points and 1 other entries)"]

    client.restore_experiment(lost[1])
    client.restore_run(gone.info.run_id)
    (stored_root / "moved.html").rename(copy)
    (stored_root / "spool" / "e-.jsonl").unlink()
    assert main(["replay", str(stored_root)]) == 0
    assert capsys.readouterr().out.startswith("4 run(s) are whole on ")
    assert all(find_run(client, key).data.metrics == {"train/loss": 1.0} for key in keys)
    assert unsent(stored_root, "c", None) == []


def test_a_line_cut_off_by_a_crash_is_counted_and_costs_only_itself(tmp_path: Path, root: Path, client: Any) -> None:
    lose(tmp_path, "e9", 1.0, step=0)
    (spool,) = spool_directory(tmp_path).glob("*.jsonl")
    with spool.open("ab") as file:
        file.write(b'{"kind":"metrics","time_ms":17,"st')
    assert replay(tmp_path, store_uri(LOCAL, root)).num_broken_lines == 1
    lose(tmp_path, "e9", 2.0, step=1)
    sent = replay(tmp_path, store_uri(LOCAL, root))
    assert (sent.num_points, sent.num_broken_lines) == (1, 1)
    assert points(client, find_run(client, "e9"), "train/loss") == [(0, 1.0), (1, 2.0)]


def test_more_points_params_and_longer_tags_than_a_request_holds_all_arrive(root: Path, client: Any) -> None:
    with Tracker(LOCAL, root=root, experiment="tiny", key="e10", name="x") as tracker:
        for step in range(30):
            tracker.log({f"layer/norm_{i}": float(step) for i in range(50)}, step=step)
        tracker.log_params({f"p{i}": i for i in range(250)})
    run = find_run(client, "e10")
    assert all(len(points(client, run, f"layer/norm_{i}")) == 30 for i in (0, 33, 49))
    assert len(run.data.params) == 250
    many = {f"p{i}": "\N{SLIGHTLY SMILING FACE}" * 6000 for i in range(40)}  # 12 bytes of JSON each
    with Tracker(LOCAL, root=root, experiment="tiny", key="e12", name="x", params=many) as tracker:
        tracker.log_params({"instruction": "x" * 7000})
        tracker.set_tags({"mlflow.note.content": "y" * 9000})
    data = find_run(client, "e12").data
    assert len(data.params) == 41
    assert data.params["p39"] == many["p39"]
    assert data.params["instruction"].endswith("x [cut: 7000 characters in all]")
    assert data.tags["mlflow.note.content"].endswith("y [cut: 9000 characters in all]")


def test_points_and_keys_that_nobody_could_read_are_refused_at_once(root: Path, client: Any) -> None:
    tracker = Tracker(LOCAL, root=root, experiment="tiny", key="e11", name="x")
    with pytest.raises(ConfigError, match="metric train/loss of step 3 must be finite, got inf"):
        tracker.log({"train/loss": float("inf"), "train/kl": 1.0}, step=3)
    tracker.detach()
    assert find_run(client, "e11").data.metrics == {}
    with pytest.raises(ConfigError, match=r"tracking\.key must be .* got \"e'1\""):
        Tracker(LOCAL, root=root, experiment="tiny", key="e'1", name="x")
