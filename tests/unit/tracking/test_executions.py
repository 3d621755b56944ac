"""Executions read through MLflow's REST API: page after page, with the client's credentials, or an error that says why.

That a real server and its SQLite file say the same is tested in tests/browser, the file alone in stages/test_execution.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.tracking import TrackingError, read_executions


class Server(HTTPServer):
    """Gives one run a page, and keeps what it was asked."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.names = names
        self.experiments: Any = {"experiments": [{"experiment_id": "7", "name": "tiny"}]}
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
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


def test_every_page_is_read_and_the_newest_comes_first(server: Server) -> None:
    found = read_executions(server.address)
    assert [run.name for run in found] == ["three", "two", "one"]
    assert (found[0].experiment, found[0].metrics, found[0].params, found[0].tags) == (
        "tiny",
        {"result/hours": 2.0},
        {},
        {"node": "n"},
    )
    _, asked, _ = server.asked[1]
    assert asked["filter"] == "tags.`slipstream.kind` = 'execution'"
    assert asked["experiment_ids"] == ["7"]


def test_named_executions_come_in_the_order_of_their_names(server: Server) -> None:
    assert [run.name for run in read_executions(server.address, names=["one", "three"])] == ["one", "three"]


@pytest.mark.parametrize(
    ("variables", "header"),
    [
        ({"MLFLOW_TRACKING_TOKEN": "t"}, "Bearer t"),
        ({"MLFLOW_TRACKING_USERNAME": "u", "MLFLOW_TRACKING_PASSWORD": "p"}, "Basic dTpw"),
        ({}, None),
    ],
)
def test_the_server_gets_the_credentials_of_mlflows_client(
    server: Server, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], header: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    read_executions(server.address)
    assert {given for _, _, given in server.asked} == {header}


def test_a_server_that_is_away_is_an_error_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrackingError, match=r"^tracking server http://127.0.0.1:9: experiments/search: "):
        read_executions("http://127.0.0.1:9")
    assert main(["compare", "--uri", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("error: tracking server http://127.0.0.1:9")


def test_compare_names_the_field_that_is_wrong(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--uri", server.address, "--runs", "four"]) == 2
    message = f"error: runs must name executions of {server.address}, got 'four'; the newest: three, two, one\n"
    assert capsys.readouterr().err == message
    assert main(["compare", "--uri", server.address, "--experiment", "huge"]) == 2
    assert capsys.readouterr().err.endswith("got 'huge'; known: tiny\n")


def test_views_prints_the_addresses_of_both_tables(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["views", "--uri", server.address, "--server", "http://127.0.0.1:5000"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tiny, executions: http://127.0.0.1:5000/#/experiments/7/runs?viewStateShareKey=executions",
        "tiny, arms: http://127.0.0.1:5000/#/experiments/7/runs?viewStateShareKey=arms",
    ]


def test_all_executions_of_a_large_store_are_asked_for_in_one_page_and_no_other_run(server: Server) -> None:
    server.names = ["one"]
    read_executions(server.address)
    (_, _, _), (path, asked, _) = server.asked
    assert path.endswith("/runs/search")
    assert asked["max_results"] >= 200
    assert "'execution'" in asked["filter"]  # 200 executions have 8000 runs of tasks beside them


@pytest.mark.parametrize("answer", [{"experiments": ["tiny"]}, {"experiments": [{"id": "7"}]}, ["tiny"]])
def test_an_answer_of_something_else_than_mlflow_is_an_error_with_the_address(server: Server, answer: Any) -> None:
    server.experiments = answer
    with pytest.raises(TrackingError, match=f"tracking server {server.address}: no answer of MLflow's"):
        read_executions(server.address)
