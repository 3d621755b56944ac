"""A real MLflow server on a store of two executions, for the tests of its views."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.drafts.length import DraftLength
from slipstream.recipe import load_recipe, parameters
from slipstream.records.files import write_record
from slipstream.records.run import DriftRecord
from slipstream.report.page import write_report
from slipstream.stages.runs import end_reported_execution, tracked
from slipstream.stages.start_run import start_run
from slipstream.stages.train_grpo import arm_labels
from slipstream.train.metrics import metrics_of
from tests.forked.ranks import free_ports
from tests.unit.report.handmade import RECORD

_START_S = 150.0  # importing MLflow's server takes 10 s alone, and 50 on a busy machine


@dataclass(frozen=True)
class Served:
    uri: str
    address: str


@contextmanager
def served(root: Path, store: str) -> Iterator[Served]:
    """MLflow's server on `store`, for as long as it is needed; its log and its artifacts lie under `root`."""
    (port,) = free_ports(1)
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
            _wait_for(f"{address}/health", server, root / "server.log")
            yield Served(uri=store, address=address)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)  # the server's own workers too
            server.wait(30)


def log_execution(root: Path, name: str, seed: int, uri: str | None = None) -> None:
    """The handmade record, logged by the functions that the tasks call.

    Args:
        uri: the tracking server; None is the SQLite store under `root`.
    """
    overrides = {"tracking": {"uri": uri, "replay_every_s": 0.1, "close_wait_s": 120.0}, "grpo": {"seed": seed}}
    context, path = start_run("tiny", root=root, execution=name, overrides=overrides)
    recipe = load_recipe(str(path))
    for record in RECORD.arms:
        length = DraftLength(num_speculative_tokens=record.num_speculative_tokens, schedule=record.schedule)
        labels = arm_labels(recipe, record.arm, length)
        title, params = f"{name} {record.arm.value}", {**parameters(recipe), **labels}
        with tracked(context, recipe, f"train_grpo_{record.arm.value}", labels, name=title, params=params) as tracker:
            for step in record.steps:
                tracker.log(metrics_of(step), step.step)
    write_record(RECORD, root / name / "report" / "run.json")
    report = write_report(RECORD, root / name / "report")
    end_reported_execution(context, recipe, RECORD, report, DriftRecord(summary="Not compared."))


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, f"the server ended:\n{log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url} did not answer within {_START_S} s")
