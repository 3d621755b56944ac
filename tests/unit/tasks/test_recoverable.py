"""Flyte uses another attempt for what may not come again, and for nothing else."""

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from requests.exceptions import ConnectTimeout

from slipstream.config import ConfigError
from slipstream.records.files import write_record
from slipstream.workers.calls import LostWorkerError
from tasks.certify_losslessness import require_lossless
from tasks.recoverable import recoverable
from tests.unit.report.handmade import CERTIFICATE
from tests.unit.tasks.declared import dispatched, error_in

ERRORS = {
    "lost": LostWorkerError("learner rank 0 died", []),
    "wrong": ConfigError("grpo.group_size must be >= 2, got 1"),
    "unknown": FloatingPointError("the loss is not finite"),
    "hub": ConnectTimeout("huggingface.co"),
}


@task
@recoverable(timedelta(seconds=30))
def failing(kind: str) -> str:
    if kind in ERRORS:
        raise ERRORS[kind]
    return kind


@pytest.mark.parametrize(
    ("kind", "written", "said"),
    [
        ("lost", "RECOVERABLE", "learner rank 0 died"),
        ("wrong", "NON_RECOVERABLE", "got 1"),
        ("unknown", "NON_RECOVERABLE", "not finite"),
    ],
)
def test_an_error_says_whether_a_retry_is_due(tmp_path: Path, kind: str, written: str, said: str) -> None:
    """Flytekit writes `Trace:`, the traceback, and the message last: 35 lines down in the console."""
    meta = dispatched(failing, {"kind": kind}, tmp_path)
    assert not (meta / "outputs.pb").exists()
    got, message = error_in(meta / "error.pb")
    assert (got, said in message) == (written, True)
    if kind == "wrong":  # a user's error is the first thing that the console shows
        first = [line.strip() for line in message.splitlines() if line.strip()][1]
        assert first.endswith("grpo.group_size must be >= 2, got 1")
        assert "File " not in message


def test_another_attempt_leaves_the_hub_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("tasks.recoverable.time.sleep", waited.append)
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", attempt)
        (tmp_path / attempt).mkdir()
        meta = dispatched(failing, {"kind": "hub"}, tmp_path / attempt)
        assert error_in(meta / "error.pb")[0] == "RECOVERABLE"
    assert waited == [60.0, 300.0, 0.0]


def test_an_attempt_ends_at_its_deadline_with_the_line_that_it_was_at_and_an_interrupt_passes_as_it_is() -> None:
    def endless() -> None:
        while True:
            time.sleep(0.01)

    def interrupted() -> None:
        raise KeyboardInterrupt("SIGTERM")

    with pytest.raises(FlyteRecoverableException, match=r"endless must end within 0:00:00.05.*; it was in endless"):
        recoverable(timedelta(seconds=0.05))(endless)()
    recoverable(timedelta(seconds=0.05))(lambda: None)()
    time.sleep(0.1)  # no alarm is left
    with pytest.raises(KeyboardInterrupt):
        recoverable(timedelta(seconds=30))(interrupted)()


@pytest.mark.parametrize("verdict", ["lossless", "biased", "too weak"])
def test_the_last_task_hands_the_report_on_or_ends_the_workflow_by_its_verdict(tmp_path: Path, verdict: str) -> None:
    given = {name: tmp_path / name for name in ("certificate", "report")}
    for directory in given.values():
        directory.mkdir()
    write_record(replace(CERTIFICATE, verdict=verdict), given["certificate"] / "certificate.json")
    (given["report"] / "report.html").write_text("<html></html>")
    inputs = {name: FlyteDirectory(str(directory)) for name, directory in given.items()}
    meta = dispatched(require_lossless, inputs, tmp_path / "pod")
    assert (meta / "outputs.pb").exists() == (verdict == "lossless")
    if verdict != "lossless":
        kind, message = error_in(meta / "error.pb")
        assert (kind, f"the run is {verdict}: {CERTIFICATE.reason}; see" in message) == ("NON_RECOVERABLE", True)
