"""What runs logged is read back: from a server page after page, from a SQLite file, or with an error that says why."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from slipstream.tracking.config import TrackingConfig, store_uri
from slipstream.tracking.mlflow_store import TrackingError, open_store, read_executions
from slipstream.tracking.tracker import Tracker
from tests.unit.conftest import Command


class Server(HTTPServer):
    """Gives one run a page, and keeps what it was asked."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.names = names
        self.experiments: Any = {"experiments": [{"experiment_id": "7", "name": "tiny"}]}
        self.asked: list[dict[str, Any]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.path.endswith("/experiments/search"):
            answer: Any = self.server.experiments
        else:
            index = int(body.get("page_token", "0"))
            answer = {"runs": [_run(self.server.names[index], index)]}
            if index + 1 < len(self.server.names):
                answer["next_page_token"] = str(index + 1)
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _run(name: str, index: int) -> dict[str, Any]:
    info = {"run_id": name, "run_name": name, "experiment_id": "7", "status": "FINISHED", "start_time": 1000 + index}
    metrics = [{"key": "result/hours", "value": 2, "timestamp": 0, "step": 0}]
    return {"info": info, "data": {"metrics": metrics, "tags": [{"key": "node", "value": "n"}]}}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(["one", "two", "three"]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


def test_every_page_is_read_and_the_newest_comes_first_or_the_order_of_names(server: Server) -> None:
    found = read_executions(server.address)
    assert [run.name for run in found] == ["three", "two", "one"]
    assert (found[0].metrics, found[0].params, found[0].tags) == ({"result/hours": 2.0}, {}, {"node": "n"})
    asked = server.asked[1]
    assert (asked["filter"], asked["experiment_ids"]) == ("tags.`slipstream.kind` = 'execution'", ["7"])
    assert asked["max_results"] >= 200  # 200 executions of a large store are one page
    assert [run.name for run in read_executions(server.address, names=["one", "three"])] == ["one", "three"]


def test_a_server_that_is_away_or_is_no_mlflow_is_an_error_with_its_address(command: Command, server: Server) -> None:
    with pytest.raises(TrackingError, match=r"^tracking server http://127.0.0.1:9: .*refused"):
        read_executions("http://127.0.0.1:9")
    said = command("compare", "--uri", "http://127.0.0.1:9", status=1)
    assert said.startswith("error: tracking server http://127.0.0.1:9")
    server.experiments = ["tiny"]
    with pytest.raises(TrackingError, match=f"tracking server {server.address}: .*not in a valid JSON format"):
        read_executions(server.address)


def test_compare_names_the_field_that_is_wrong(server: Server, command: Command) -> None:
    said = command("compare", "--uri", server.address, "--runs", "four", status=2)
    message = f"error: runs must name executions of {server.address}, got 'four'; the newest: three, two, one\n"
    assert said == message
    said = command("compare", "--uri", server.address, "--experiment", "huge", status=2)
    assert said.endswith("got 'huge'; known: tiny\n")


def test_views_prints_the_addresses_of_both_tables(server: Server, command: Command) -> None:
    page = "http://127.0.0.1:5000/#/experiments/7/runs?viewStateShareKey"
    printed = command("views", "--uri", server.address, "--server", "http://127.0.0.1:5000")
    assert printed.splitlines() == [f"tiny, executions: {page}=executions", f"tiny, arms: {page}=arms"]


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
