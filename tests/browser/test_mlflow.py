"""A real MLflow server, as a platform keeps it: a spool is replayed into it, and `compare` and a browser read it.

Its store is on PostgreSQL where `make test` finds Debian's (`apt-get install postgresql`), and else a file. Views are
tested where chromium is installed (`apt-get install chromium`); screenshots lie in the test's directory, or
in $SLIPSTREAM_SCREENSHOTS.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.report.comparison import answer, comparison_table
from slipstream.tracking.mlflow_store import Execution, open_store, read_executions, view_addresses
from slipstream.tracking.replay import ReplayResult, replay
from slipstream.types import Arm
from tests.browser.server import log_execution, postgres_programs, postgres_server, served

CHROMIUM = shutil.which("chromium")
HAS_POSTGRES = postgres_programs() is not None and importlib.util.find_spec("psycopg2") is not None
pytestmark = pytest.mark.slow
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """Two executions as they were logged, and a server that has them."""

    root: Path
    address: str
    logged: list[Execution]
    sent: ReplayResult | None  # None: the server's store is the file into which they were logged


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        log_execution(root, f"tiny-{seed}", seed)
    file = f"sqlite:///{root}/mlflow.db"
    with ExitStack() as stack:
        store = stack.enter_context(postgres_server()) if HAS_POSTGRES else file
        address = stack.enter_context(served(root, store))
        sent = replay(root, address) if HAS_POSTGRES else None
        yield Tracked(root=root, address=address, logged=read_executions(file), sent=sent)


def test_a_server_has_what_was_logged_and_compare_answers_from_it(
    tracked: Tracked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if tracked.sent is not None:
        # Of each execution its own run, and those of both arms.
        assert (tracked.sent.num_runs, tracked.sent.num_broken_lines) == (6, 0)
        assert tracked.sent.num_points > 0
        assert replay(tracked.root, tracked.address).num_points == 0
    served = read_executions(tracked.address, experiment="tiny")
    assert [(run.name, run.status) for run in served] == [("tiny-2", "FINISHED"), ("tiny-1", "FINISHED")]
    for first, second in zip(tracked.logged, served, strict=True):
        assert (second.metrics, second.params, second.start_ms) == (first.metrics, first.params, first.start_ms)
    assert comparison_table(served) == comparison_table(tracked.logged)

    page = tmp_path / "page.html"
    command = ["compare", "--uri", tracked.address, "--experiment", "tiny", "--runs", "tiny-1", "--html", str(page)]
    assert main(command) == 0
    assert "Step: faster" in answer(served[1])
    assert f"tiny-1: {answer(served[1])}" in capsys.readouterr().out
    assert f"<b>tiny-1</b>: {answer(served[1])}" in page.read_text()


@in_a_browser
def test_the_table_of_executions_shows_speedups_and_rewards(tracked: Tracked, tmp_path: Path) -> None:
    page = _browse(_view(tracked, "executions"), tmp_path / "executions.png")
    for column in ("generation_speedup", "step_speedup", "reward_autoregressive", "reward_speculative", "lossless"):
        assert f"result/{column}" in page
    rows = _rows(page)
    assert {row for row in rows if "tiny-" in row} == {"tiny-1", "tiny-2"}  # the arms are in the other view
    assert rows.count("2") + rows.count("2.000") >= 2  # the generation speedup of both


@in_a_browser
def test_the_table_of_arms_shows_which_arm_and_its_k(tracked: Tracked, tmp_path: Path) -> None:
    rows = _rows(_browse(_view(tracked, "arms"), tmp_path / "arms.png"))
    names = {f"tiny-{seed} {arm.value}" for seed in (1, 2) for arm in Arm}
    assert {row for row in rows if row.startswith("tiny-")} == names
    assert rows.count("none") == 2  # the method of the two arms without drafts
    assert rows.count("eagle3") == 2


def _view(tracked: Tracked, view: str) -> str:
    (experiment_id,) = [id_ for id_, name in open_store(tracked.address).experiments().items() if name == "tiny"]
    return view_addresses(tracked.address, experiment_id)[view]


def _browse(url: str, screenshot: Path) -> str:
    """The page as it stands after its scripts ran; a screenshot of it is kept."""
    assert CHROMIUM is not None
    kept = Path(os.environ.get("SLIPSTREAM_SCREENSHOTS", screenshot.parent))
    kept.mkdir(parents=True, exist_ok=True)
    profile = screenshot.with_suffix(".profile")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=2600,900"]
    options += [f"--user-data-dir={profile}", "--virtual-time-budget=15000", f"--screenshot={kept / screenshot.name}"]
    done = subprocess.run([CHROMIUM, *options, "--dump-dom", url], capture_output=True, text=True, timeout=120)
    shutil.rmtree(profile, ignore_errors=True)
    assert (kept / screenshot.name).stat().st_size > 0
    return done.stdout


def _rows(page: str) -> list[str]:
    """The texts between tags."""
    return [text.strip() for text in re.findall(r">([^<>]+)<", unescape(page)) if text.strip()]
