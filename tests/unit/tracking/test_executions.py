"""What runs logged is read back: from a store page after page, or with an error that says why."""

import threading
from collections.abc import Callable
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from slipstream.tracking import mlflow_store
from slipstream.tracking.config import EXECUTION, KIND_TAG, TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import TrackingError, open_store, read_executions
from slipstream.tracking.tracker import Tracker
from tests.unit.conftest import Command, Refusal


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[[Path], Path]) -> str:
    """Three executions of one experiment, with the run of a task beside them."""
    from mlflow.tracking import MlflowClient

    uri = store_uri(TrackingConfig(), make_store(tmp_path_factory.mktemp("runs")))
    client = MlflowClient(uri)
    experiment = client.create_experiment("tiny")
    for start_ms, name in enumerate(("one", "two", "three"), start=1000):
        tags = {KIND_TAG: EXECUTION, "node": "n"}
        run = client.create_run(experiment, start_time=start_ms, tags=tags, run_name=name)
        client.log_metric(run.info.run_id, "result/hours", 2.0)
    client.create_run(experiment, run_name="task")
    return uri


def test_every_page_is_read_and_the_newest_comes_first_or_the_order_of_names(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mlflow_store._PAGE >= 200  # 200 executions of a large store are one page
    monkeypatch.setattr(mlflow_store, "_PAGE", 1)
    found = read_executions(store)
    assert [run.name for run in found] == ["three", "two", "one"]
    assert (found[0].metrics, found[0].params, found[0].tags["node"]) == ({"result/hours": 2.0}, {}, "n")
    assert [run.name for run in read_executions(store, names=["one", "three"])] == ["one", "three"]
    assert read_executions(store, experiment="Default") == []


def test_a_server_that_is_away_or_is_no_mlflow_is_an_error_with_its_address(command: Command) -> None:
    with pytest.raises(TrackingError, match=r"^tracking server http://127.0.0.1:9: .*refused"):
        read_executions("http://127.0.0.1:9")
    said = command("compare", "--uri", "http://127.0.0.1:9", status=1)
    assert said.startswith("error: tracking server http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(TrackingError, match=f"^tracking server {address}: .* failed with error code 501"):
            read_executions(address)
        server.shutdown()


def test_compare_names_the_field_that_is_wrong(store: str, command: Command) -> None:
    said = command("compare", "--uri", store, "--runs", "four", status=2)
    assert said == f"error: runs must name executions of {store}, got 'four'; the newest: three, two, one\n"
    said = command("compare", "--uri", store, "--experiment", "huge", status=2)
    assert said == f"error: experiment must name an experiment of {store}, got 'huge'; known: Default, tiny\n"


def test_views_prints_the_addresses_of_both_tables(store: str, command: Command) -> None:
    (tiny,) = [key for key, name in open_store(store).experiments().items() if name == "tiny"]
    page = f"http://127.0.0.1:5000/#/experiments/{tiny}/runs?viewStateShareKey"
    printed = command("views", "--uri", store, "--server", "http://127.0.0.1:5000")
    assert printed.splitlines()[2:] == [f"tiny, executions: {page}=executions", f"tiny, arms: {page}=arms"]


def test_an_address_of_no_store_is_refused(refusal: Refusal) -> None:
    assert refusal(read_executions, uri="sqlite:///no/such.db").startswith("uri must name a store, got 'sqlite:///no/")
    said = refusal(read_executions, uri="postgresql://h")
    assert said.startswith("uri must be the address of an MLflow server or sqlite:///FILE, got 'postgresql://h'; start")


@pytest.mark.parametrize("content", [b"", b"no database at all"])
def test_a_file_that_is_no_store_is_an_error_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.db").write_bytes(content)
    with pytest.raises(TrackingError, match=r"tracking store .*other.db: (no such table|file is not a database)"):
        read_executions(f"sqlite:///{tmp_path}/other.db")
    assert (tmp_path / "other.db").read_bytes() == content


def test_an_artifact_comes_back_by_the_runs_key_and_a_missing_one_is_named(stored_root: Path) -> None:
    config = TrackingConfig(replay_every_s=0.1)
    logged = stored_root / "run.json"
    logged.write_text('{"recipe": "tiny"}')
    with Tracker(config, root=stored_root, experiment="artifacts", key="demo-1/a", name="a") as tracker:
        tracker.log_artifact(logged)
    store, out = open_store(store_uri(config, stored_root)), stored_root / "out"
    out.mkdir()
    assert store.fetch_artifact("demo-1/a", "run.json", out).read_text() == '{"recipe": "tiny"}'
    with pytest.raises(TrackingError, match=r"run 'demo-1/a' has no artifact 'other.json'"):
        store.fetch_artifact("demo-1/a", "other.json", out)
    with pytest.raises(TrackingError, match="no run has the key 'demo-2'"):
        store.fetch_artifact("demo-2", "run.json", out)
