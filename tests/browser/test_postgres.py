"""MLflow's server on PostgreSQL, as a platform keeps it: a spool is replayed into it, and `compare` answers from it.

`make test` runs it where Debian's PostgreSQL is installed (`apt-get install postgresql`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.report.comparison import answer, comparison_table
from slipstream.tracking.mlflow_store import read_executions
from slipstream.tracking.replay import replay
from slipstream.tracking.spool import spool_directory
from tests.browser.postgres import postgres_server, programs
from tests.browser.server import log_execution, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed: apt-get install postgresql"),
    pytest.mark.skipif(
        importlib.util.find_spec("psycopg2") is None, reason="psycopg2 is not installed: it is part of the extra dev"
    ),
]


def test_a_spool_is_replayed_into_a_server_on_postgresql_and_compare_answers_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        log_execution(tmp_path, f"tiny-{seed}", seed)
    tracked_first = read_executions(f"sqlite:///{tmp_path}/mlflow.db")

    with postgres_server() as store, served(tmp_path, store) as server:
        sent = replay(spool_directory(tmp_path), server.address)
        assert (sent.num_runs, sent.num_broken_lines) == (6, 0)  # of each execution its own and those of both arms
        assert sent.num_points > 0
        assert replay(spool_directory(tmp_path), server.address).num_points == 0

        replayed = read_executions(server.address)
        assert [(run.name, run.status) for run in replayed] == [("tiny-2", "FINISHED"), ("tiny-1", "FINISHED")]
        for first, second in zip(tracked_first, replayed, strict=True):
            assert (second.metrics, second.params, second.start_ms) == (first.metrics, first.params, first.start_ms)
        assert comparison_table(replayed) == comparison_table(tracked_first)

        page = tmp_path / "page.html"
        command = ["compare", "--uri", server.address, "--experiment", "tiny", "--runs", "tiny-1", "--html", str(page)]
        assert main(command) == 0
    said = capsys.readouterr().out
    assert f"tiny-1: {answer(replayed[1])}" in said
    assert "tiny-1" in page.read_text()
