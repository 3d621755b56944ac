"""`slipstream run` of one arm is interrupted at its start and in training, and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient

from slipstream.tracking.replay import replay
from tests.forked.tasks import not_forked
from tests.integration.small_recipe import write_small_recipe

pytestmark = pytest.mark.slow

_PATIENCE_S = 600.0  # of what is waited for on a busy machine
_STOPPED_S = 15.0  # five on a machine of its own; tests share theirs


class Run:
    """One `slipstream run` and what it printed.

    Whatever comes from one that is interrupted must be its descendant, so none of its workers is forked elsewhere.
    """

    def __init__(self, directory: Path, name: str, *arguments: str, is_interrupted: bool = False) -> None:
        self.log = directory / f"{name}.log"
        command = [sys.executable, "-m", "slipstream.cli", "run", "--run-root", str(directory / "runs"), *arguments]
        with self.log.open("w") as log:
            environment = not_forked(os.environ) if is_interrupted else dict(os.environ)
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.1)

    def interrupt(self, number: signal.Signals) -> None:
        """Nothing that came from it may be alive when it has ended, which takes seconds."""
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        assert descendants
        self.process.send_signal(number)
        interrupted_s = time.monotonic()
        assert self.process.wait(_PATIENCE_S) == 128 + number
        assert time.monotonic() - interrupted_s < _STOPPED_S
        assert [process for process in descendants if process.is_running()] == []

    def finish(self) -> str:
        assert self.process.wait(_PATIENCE_S) == 0, self.log.read_text()
        return self.log.read_text()


def statuses(root: Path, execution: str) -> dict[str, str]:
    """Replay the spool; return the status of each MLflow run of an execution, by key."""
    uri = f"sqlite:///{root}/mlflow.db"
    replay(root, uri)
    client = MlflowClient(uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    keys = {run.data.tags["slipstream.key"]: run.info.status for run in runs}
    return {key: status for key, status in keys.items() if key.split("/")[0] == execution}


def test_a_run_is_interrupted_at_its_start_and_in_training_and_resumed(tmp_path: Path) -> None:
    recipe = write_small_recipe(tmp_path / "smoke.yaml", {"grpo": {"num_steps": 6}})
    runs = tmp_path / "runs"

    early = Run(tmp_path, "early", str(recipe), is_interrupted=True)
    early.wait_for("starting Ray")
    early.interrupt(signal.SIGTERM)
    early_execution = next(path for path in runs.glob("smoke-*")).name
    last = early.log.read_text().splitlines()[-1]
    assert last.endswith(f"run --run-root {runs} --resume {early_execution}")
    assert statuses(runs, early_execution)[early_execution] == "KILLED"

    late = Run(tmp_path, "late", str(recipe), is_interrupted=True)
    late.wait_for("train_grpo speculative: step 3/6")
    late.interrupt(signal.SIGINT)
    execution = max(path.name for path in runs.glob("smoke-*"))
    said = late.log.read_text()
    for measured in ("first measured speedup: k=2", "speculative: step 1/6"):
        assert measured in said
    assert "finished before" not in said
    assert said.splitlines()[-1].endswith(f"--resume {execution}")
    ended = statuses(runs, execution)
    assert ended[execution] == ended[f"{execution}/train_grpo_speculative"] == "KILLED"
    for spool in (runs / "spool").glob("*.jsonl"):
        assert [json.loads(line) for line in spool.read_text().splitlines()]

    resumed = Run(tmp_path, "resumed", "--resume").finish()
    for stage in ("prepare_data", "prepare_policy", "pretrain_draft", "tune_draft_length"):
        assert f"{stage}: finished before" in resumed
    assert re.search("resuming from step-00000[24]", resumed)  # as far as it came before it ended
    assert "speculative: step 1/6" not in resumed
    assert "autoregressive: step" not in resumed
    assert "The speculative arm was trained alone" in resumed
    assert not (runs / execution / "train_grpo_autoregressive").exists()
    assert set(statuses(runs, execution).values()) == {"FINISHED"}
