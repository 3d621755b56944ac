"""Flyte uses another attempt for what may not come again, and for nothing else."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from requests.exceptions import ConnectTimeout

from slipstream.config import ConfigError
from slipstream.workers.calls import LostWorkerError
from tasks.recoverable import recoverable
from tests.unit.tasks.conftest import ErrorDocument


@task
@recoverable(timedelta(seconds=30))
def failing(kind: str) -> str:
    if kind == "lost":
        raise LostWorkerError("learner rank 0 died", [])
    if kind == "wrong":
        raise ConfigError("grpo.group_size must be >= 2, got 1")
    if kind == "unknown":
        raise FloatingPointError("the loss is not finite")
    if kind == "hub":
        raise ConnectTimeout("huggingface.co")
    return kind


@pytest.mark.parametrize(
    ("kind", "written"), [("lost", "RECOVERABLE"), ("wrong", "NON_RECOVERABLE"), ("unknown", "NON_RECOVERABLE")]
)
def test_the_error_document_says_whether_another_attempt_is_due(
    tmp_path: Path, kind: str, written: str, error_document: ErrorDocument
) -> None:
    got, message = error_document(failing, {"kind": kind}, tmp_path)

    assert got == written
    assert {"lost": "learner rank 0 died", "wrong": "got 1", "unknown": "not finite"}[kind] in message


def test_a_users_error_is_the_first_thing_that_the_console_shows(tmp_path: Path, error_document: ErrorDocument) -> None:
    """flytekit writes `Trace:`, the traceback, and the message last: 35 lines down in the console."""
    _, message = error_document(failing, {"kind": "wrong"}, tmp_path)
    first = [line.strip() for line in message.splitlines() if line.strip()][1]
    assert first.endswith("grpo.group_size must be >= 2, got 1")
    assert "File " not in message


def test_another_attempt_leaves_the_hub_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_document: ErrorDocument
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("tasks.recoverable.time.sleep", waited.append)
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", attempt)
        (tmp_path / attempt).mkdir()
        assert error_document(failing, {"kind": "hub"}, tmp_path / attempt)[0] == "RECOVERABLE"
    assert waited == [60.0, 300.0, 300.0]


@task
@recoverable(timedelta(seconds=0.5))
def unending(name: str) -> str:
    while name:
        time.sleep(0.01)
    return name


def test_in_a_pod_an_attempt_ends_at_its_deadline_and_another_follows(
    tmp_path: Path, error_document: ErrorDocument
) -> None:
    kind, message = error_document(unending, {"name": "e"}, tmp_path)
    assert kind == "RECOVERABLE"
    assert "unending must end within 0:00:00.5" in message


def test_an_attempt_ends_at_its_deadline_with_the_line_that_it_was_at() -> None:
    @recoverable(timedelta(seconds=0.05))
    def endless() -> None:
        while True:
            time.sleep(0.01)

    with pytest.raises(FlyteRecoverableException, match=r"endless must end within 0:00:00.05.*; it was in endless"):
        endless()
    recoverable(timedelta(seconds=0.05))(lambda: None)()
    time.sleep(0.1)  # no alarm is left


def test_an_interrupt_passes_as_it_is() -> None:
    @recoverable(timedelta(seconds=30))
    def interrupted() -> None:
        raise KeyboardInterrupt("SIGTERM")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
