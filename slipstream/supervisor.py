"""Supervision of a command, or a function: all its descendants end with it, or within seconds of an interrupt.

In each process SIGINT and SIGTERM act alike: they raise an interrupt, so that open resources are closed.

Linux only. Orphans of the command become children of this process (a subreaper), so none escapes through a session of
its own. The command gets a signal when this process dies. Only descendants are ever killed.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

import psutil

GRACE_S = 3.0
"""Time from an interrupt to the kill, in which the command can close its MLflow runs."""

_KILL_S = 1.5  # time for the kernel to end killed processes
_ASK_S = 0.75  # interval of repeated signals: Python drops exceptions that a handler raises in some callbacks
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Exit of a command."""

    pid: int
    status: int  # 128 + the signal's number after an interrupt, as in a shell
    interrupted: bool


def supervise(command: Sequence[str], *, cwd: Path, environment: Mapping[str, str]) -> Outcome:
    """Run `command` until it ends, or until SIGINT or SIGTERM reaches this process or its foreground group.

    No descendant is left when this returns. The command runs in a session of its own, so Ctrl-C reaches it only through
    this process; a second Ctrl-C kills it at once.
    """
    return _supervise(
        lambda: subprocess.Popen(
            command, cwd=cwd, env=dict(environment), start_new_session=True, preexec_fn=_end_with_parent
        )
    )


def supervise_call(work: Callable[[], object]) -> Outcome:
    """Run `work` as `supervise` runs a command, in a fork of this process, which must have a single thread."""
    return _supervise(lambda: _Fork(work))


class _Fork(ForkProcess):
    """Forked process that is polled as `subprocess.Popen` is."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work
        self.start()

    def run(self) -> None:
        """Run the function, without the handlers of the supervisor."""
        raise_on_signals()
        os.setsid()
        _end_with_parent()
        self._work()

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        return self.exitcode


def _supervise(start: Callable[[], subprocess.Popen[bytes] | _Fork]) -> Outcome:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with _caught_signals() as caught:
        child = start()
        try:
            status = _wait(child, caught)
        finally:
            _end_descendants()
    interrupted = bool(caught)
    return Outcome(pid=child.pid or 0, status=128 + caught[0] if interrupted else status or 0, interrupted=interrupted)


def _wait(child: subprocess.Popen[bytes] | _Fork, caught: Sequence[int]) -> int | None:
    """Wait for `child`, and return its exit status; the first signal in `caught` terminates it within `GRACE_S`.

    Returns None if it still runs after the grace time or a second signal.
    """
    interrupted_s, num_asked = math.inf, 0
    while (status := child.poll()) is None:
        if caught:
            interrupted_s = min(interrupted_s, time.monotonic())
            passed_s = time.monotonic() - interrupted_s
            if len(caught) > 1 or passed_s >= GRACE_S:
                return None
            if passed_s >= num_asked * _ASK_S:
                child.terminate()
                num_asked += 1
        time.sleep(_POLL_S)
    return status


def _end_descendants() -> None:
    """Kill all descendants, including those started meanwhile, until none is left."""
    deadline_s = time.monotonic() + _KILL_S
    while (descendants := psutil.Process().children(recursive=True)) and time.monotonic() < deadline_s:
        for process in descendants:
            with suppress(psutil.NoSuchProcess):  # it ended first
                process.kill()
        with suppress(ChildProcessError):  # reap dead children, which `children` would list
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S / 5)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect the numbers of signals within the block."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: caught.append(number)) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Ask the kernel to terminate this child when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def raise_on_signals() -> None:
    """Make both signals raise KeyboardInterrupt in this process; safe to repeat, and off the main thread.

    Flytekit and Ray install handlers of their own, so callers repeat this before they open a resource.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    _handle_signals(interrupt)


def ignore_signals() -> None:
    """Ignore both signals while runs are closed, so that a repeated signal does not interrupt that."""
    _handle_signals(signal.SIG_IGN)


def _handle_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handler)
