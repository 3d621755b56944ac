"""What people see: a real MLflow server with two executions' runs, and the page of `compare`, in a real browser.

`make test` runs it where Debian's chromium is installed (`apt-get install chromium`). Screenshots lie in the test's
directory, or in $SLIPSTREAM_SCREENSHOTS.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

from slipstream.recipe import load_recipe, parameters
from slipstream.records import write_record
from slipstream.report.comparison import comparison_table
from slipstream.report.comparison_page import write_comparison
from slipstream.report.page import write_report
from slipstream.stages.execution import end_reported_execution
from slipstream.stages.start_run import start_run
from slipstream.stages.support import tracked
from slipstream.stages.train_grpo import arm_labels
from slipstream.tracking import experiment_names, read_executions, view_addresses
from slipstream.train.metrics import metrics_of
from slipstream.types import Arm
from tests.unit.report.handmade import RECORD

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
]
_START_S = 150.0  # importing MLflow's server takes 10 s alone, and 50 on a busy machine


@dataclass(frozen=True)
class Tracked:
    """A run root with two executions in it, and the server on its store."""

    uri: str
    address: str


@pytest.fixture(scope="module")
def tracked_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        _execution(root, f"tiny-{seed}", seed)
    store = f"sqlite:///{root}/mlflow.db"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (root / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--backend-store-uri", store],
            cwd=root,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_for(f"{address}/health", server)
            yield Tracked(uri=store, address=address)
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # the server's own workers too
            server.wait(30)


def test_the_table_of_executions_shows_speedups_and_rewards(tracked_runs: Tracked, tmp_path: Path) -> None:
    page = _browse(_view(tracked_runs, "executions"), tmp_path / "executions.png")
    for column in ("generation_speedup", "step_speedup", "reward_autoregressive", "reward_speculative", "lossless"):
        assert f"result/{column}" in page
    rows = _rows(page)
    assert {row for row in rows if "tiny-" in row} == {"tiny-1", "tiny-2"}  # the arms are in the other view
    assert rows.count("2") + rows.count("2.000") >= 2  # the generation speedup of both


def test_the_table_of_arms_shows_which_arm_and_its_k(tracked_runs: Tracked, tmp_path: Path) -> None:
    page = _browse(_view(tracked_runs, "arms"), tmp_path / "arms.png")
    rows = _rows(page)
    names = {f"tiny-{seed} {arm.value}" for seed in (1, 2) for arm in Arm}
    assert {row for row in rows if row.startswith("tiny-")} == names
    assert rows.count("none") == 2  # the method of the two arms without drafts
    assert rows.count("eagle3") == 2


def test_the_server_and_its_file_say_the_same_of_the_executions(tracked_runs: Tracked) -> None:
    by_server, by_file = (read_executions(uri) for uri in (tracked_runs.address, tracked_runs.uri))
    assert by_server == by_file
    assert [execution.name for execution in by_server] == ["tiny-2", "tiny-1"]
    assert comparison_table(read_executions(tracked_runs.address, experiment="tiny")) == comparison_table(by_file)


def test_the_page_of_compare_answers_in_a_browser(tracked_runs: Tracked, tmp_path: Path) -> None:
    path = write_comparison(read_executions(tracked_runs.address), tmp_path / "page.html", uri=tracked_runs.address)
    page = unescape(_browse(path.as_uri(), tmp_path / "compare.png"))
    assert page.count("the speculative arm was faster (k = 2): generation 2.00x (2.00 to 3.00), step 1.60x") == 2
    assert page.count("reward +0.000, no interval") == 2
    assert "<tr><th>grpo.seed</th><td>2</td><td>1</td></tr>" in page


def _execution(root: Path, name: str, seed: int) -> None:
    """The handmade record, logged by the functions that the tasks call."""
    overrides = {"tracking": {"replay_every_s": 0.1, "close_wait_s": 120.0}, "grpo": {"seed": seed}}
    context, path = start_run("tiny", workload=None, root=root, execution=name, overrides=overrides)
    recipe = load_recipe(str(path))
    for record in RECORD.arms:
        labels = arm_labels(recipe, record.arm, record.num_speculative_tokens)
        title, params = f"{name} {record.arm.value}", {**parameters(recipe), **labels}
        with tracked(context, recipe, f"train_grpo_{record.arm.value}", labels, name=title, params=params) as tracker:
            for step in record.steps:
                tracker.log(metrics_of(step), step.step)
    write_record(RECORD, root / name / "report" / "run.json")
    end_reported_execution(context, recipe, RECORD, write_report(RECORD, root / name / "report"))


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, "the server ended; see server.log"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url} did not answer within {_START_S} s")


def _view(runs: Tracked, view: str) -> str:
    (experiment_id,) = [id_ for id_, name in experiment_names(runs.uri).items() if name == "tiny"]
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
