"""Flyte uses another attempt for what may not come again, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flytekit import task
from flytekit.core.base_task import PythonTask

from slipstream.config import ConfigError
from slipstream.workers.calls import LostWorkerError
from tasks.recoverable import recoverable


@task
@recoverable
def failing(kind: str) -> str:
    if kind == "lost":
        raise LostWorkerError("learner rank 0 died", [])
    if kind == "wrong":
        raise ConfigError("grpo.group_size must be >= 2, got 1")
    if kind == "unknown":
        raise FloatingPointError("the loss is not finite")
    return kind


@pytest.mark.parametrize(
    ("kind", "written"), [("lost", "RECOVERABLE"), ("wrong", "NON_RECOVERABLE"), ("unknown", "NON_RECOVERABLE")]
)
def test_the_error_document_says_whether_another_attempt_is_due(
    tmp_path: Path, kind: str, written: str, error_document: Callable[..., tuple[str, str]]
) -> None:
    got, message = error_document(failing, {"kind": kind}, tmp_path)

    assert got == written
    assert {"lost": "learner rank 0 died", "wrong": "got 1", "unknown": "not finite"}[kind] in message


def test_the_type_that_a_task_declares_is_that_of_its_body() -> None:
    assert isinstance(failing, PythonTask)
    assert failing.python_interface.inputs == {"kind": str}


def test_an_interrupt_passes_as_it_is() -> None:
    @recoverable
    def interrupted() -> None:
        raise KeyboardInterrupt("SIGTERM")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
