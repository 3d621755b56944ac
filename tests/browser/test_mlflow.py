"""Views of a real MLflow server with two executions' runs, and the page of `compare`, in a real browser.

`make test` runs it where Debian's chromium is installed (`apt-get install chromium`). Screenshots lie in the test's
directory, or in $SLIPSTREAM_SCREENSHOTS.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from slipstream.report.comparison import answer, comparison_table, render_comparison
from slipstream.tracking.mlflow_store import open_store, read_executions, view_addresses
from slipstream.types import Arm
from tests.browser.server import Served, log_execution, served

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def tracked_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        log_execution(root, f"tiny-{seed}", seed)
    with served(root, f"sqlite:///{root}/mlflow.db") as server:
        yield server


def test_the_table_of_executions_shows_speedups_and_rewards(tracked_runs: Served, tmp_path: Path) -> None:
    page = _browse(_view(tracked_runs, "executions"), tmp_path / "executions.png")
    for column in ("generation_speedup", "step_speedup", "reward_autoregressive", "reward_speculative", "lossless"):
        assert f"result/{column}" in page
    rows = _rows(page)
    assert {row for row in rows if "tiny-" in row} == {"tiny-1", "tiny-2"}  # the arms are in the other view
    assert rows.count("2") + rows.count("2.000") >= 2  # the generation speedup of both


def test_the_table_of_arms_shows_which_arm_and_its_k(tracked_runs: Served, tmp_path: Path) -> None:
    page = _browse(_view(tracked_runs, "arms"), tmp_path / "arms.png")
    rows = _rows(page)
    names = {f"tiny-{seed} {arm.value}" for seed in (1, 2) for arm in Arm}
    assert {row for row in rows if row.startswith("tiny-")} == names
    assert rows.count("none") == 2  # the method of the two arms without drafts
    assert rows.count("eagle3") == 2


def test_the_server_and_its_file_say_the_same_of_the_executions(tracked_runs: Served) -> None:
    by_server, by_file = (read_executions(uri) for uri in (tracked_runs.address, tracked_runs.uri))
    assert by_server == by_file
    assert [execution.name for execution in by_server] == ["tiny-2", "tiny-1"]
    assert comparison_table(read_executions(tracked_runs.address, experiment="tiny")) == comparison_table(by_file)


def test_the_page_of_compare_answers_in_a_browser(tracked_runs: Served, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    executions = read_executions(tracked_runs.address)
    path.write_text(render_comparison(executions, uri=tracked_runs.address))
    page = unescape(_browse(path.as_uri(), tmp_path / "compare.png"))
    assert ["Step: faster" in answer(execution) for execution in executions] == [True, True]
    assert all(answer(execution) in page for execution in executions)
    assert page.count("<td>+0.000</td>") == 2
    assert "<tr><th>grpo.seed</th><td>2</td><td>1</td></tr>" in page


def _view(runs: Served, view: str) -> str:
    (experiment_id,) = [id_ for id_, name in open_store(runs.uri).experiments().items() if name == "tiny"]
    return view_addresses(runs.address, experiment_id)[view]


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
