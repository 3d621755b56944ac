"""Retries and the deadline of a task: Flyte retries only after a `FlyteRecoverableException`.

Flyte's own time-out counts the wait in a queue and, doubled, all attempts together, so it is long. The deadline here
counts the time in which an attempt works.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import ParamSpec, TypeVar

from flytekit.exceptions.user import FlyteRecoverableException

from slipstream import logs
from slipstream.stages.context import RunContext
from slipstream.stages.failures import HUB, explained, transient
from tasks.live_deck import shown_while_it_runs
from tasks.resources import RETRIES, runs_locally

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class ExplainedError(RuntimeError):
    """Error whose message Flyte's console shows first: flytekit writes the traceback, here none, before it."""

    __traceback__ = None  # the log has that of the cause


def recoverable(deadline: timedelta) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Configure logging, end an attempt at its deadline, and re-raise transient errors for another attempt.

    A task with a deck and a run's context shows in it how far the run is.

    The decorator stands below `@task`. Interrupts pass unchanged: they leave no error document, so Flyte treats the pod
    as lost and starts another attempt.

    Raises:
        FlyteRecoverableException: an attempt may succeed where this one failed, or reached its deadline.
        ExplainedError: the message of the error says all.
    """

    def decorated(body: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(body)
        def attempt(*args: P.args, **kwargs: P.kwargs) -> R:
            logs.configure()
            try:
                with _ended_after(deadline, body.__name__), shown_while_it_runs(_context_of(kwargs)):
                    return body(*args, **kwargs)
            except Exception as error:
                message = explained(error)
                reason = None if runs_locally() and message is not None else transient(error)
                if reason is None:
                    if runs_locally() or message is None:
                        raise
                    logger.exception("%s failed", body.__name__)
                    raise ExplainedError(message) from None
                wait_s = _backoff_s() if reason == HUB else 0.0
                logger.error("%s: another attempt may succeed (%s), after %.0f s", body.__name__, reason, wait_s)
                time.sleep(wait_s)
                raise FlyteRecoverableException(f"{reason}: {type(error).__name__}: {error}") from error

        return attempt

    return decorated


def _context_of(inputs: Mapping[str, object]) -> RunContext | None:
    context = inputs.get("context")
    return context if isinstance(context, RunContext) else None


def _backoff_s() -> float:
    """Time before Flyte starts the next attempt, which it does at once: in pods 1 and 5 minutes, 0 after the last."""
    attempt = int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or RETRIES)  # no number on one machine, which tries once
    return 60.0 * 5**attempt if attempt < RETRIES else 0.0


@contextmanager
def _ended_after(deadline: timedelta, task: str) -> Iterator[None]:
    """Raise a `TimeoutError` in the main thread at the deadline, with the line that it was at.

    A workflow that runs in another thread has no deadline, because Python delivers signals to the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_: int, frame: FrameType | None) -> None:
        lines = [line for line in traceback.extract_stack(frame) if "slipstream" in line.filename][-1:]
        at = "".join(f"{line.name} ({line.filename}:{line.lineno})" for line in lines) or task
        raise TimeoutError(f"{task} must end within {deadline}, got no end; it was in {at}")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, deadline.total_seconds())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
