"""A command and all processes that come from it: they end with it, or within seconds of an interrupt.

In each of them SIGINT and SIGTERM alike end a run as an interrupt does: what is open is closed on the way out.

Linux alone: orphans of the command become ours (a subreaper's), so that nothing escapes by starting a session of its
own, and the command is told when we die. Nobody else's process is ever touched: only descendants are ended.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

GRACE_S = 3.0
"""From an interrupt to the kill: the command may close its MLflow runs meanwhile."""

_KILL_S = 1.5  # for the kernel to end what was killed
_ASK_S = 0.75  # it is asked again so often: Python drops what a handler raises within some callbacks
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the command ended."""

    pid: int
    status: int  # 128 + the signal's number after an interrupt: what a shell says
    interrupted: bool


def supervise(command: Sequence[str], *, cwd: Path, environment: Mapping[str, str]) -> Outcome:
    """Run `command` to its end, or to an interrupt: SIGINT or SIGTERM, to us or to the whole foreground group.

    When this returns, no descendant of ours is left. The command runs in a session of its own, so that Ctrl-C reaches
    it through us alone; a second one kills at once.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with _caught_signals() as caught:
        child = subprocess.Popen(
            command, cwd=cwd, env=dict(environment), start_new_session=True, preexec_fn=_end_with_parent
        )
        try:
            status = _wait(child, caught)
        finally:
            _end_descendants()
    interrupted = bool(caught)
    return Outcome(pid=child.pid, status=128 + caught[0] if interrupted else status or 0, interrupted=interrupted)


def _wait(child: subprocess.Popen[bytes], caught: Sequence[int]) -> int | None:
    """Wait for `child`; after the first signal in `caught` it is asked to end and has `GRACE_S` to do so.

    Returns:
        Its exit status, None if it still runs: the grace is over, or there was a second signal.
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
    """Kill all processes that come from this one, and again those that they started meanwhile, until none is left."""
    deadline_s = time.monotonic() + _KILL_S
    while (descendants := psutil.Process().children(recursive=True)) and time.monotonic() < deadline_s:
        for process in descendants:
            with suppress(psutil.NoSuchProcess):  # it was quicker
                process.kill()
        with suppress(ChildProcessError):  # dead children that nobody waits for stay, and `children` lists them
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S / 5)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """The numbers of the signals that came within the block."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: caught.append(number)) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """In the child: have the kernel ask it to end should we be killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def raise_on_signals() -> None:
    """Make both signals raise KeyboardInterrupt where the process works; safe to call again, and off the main thread.

    Flytekit and Ray set handlers of their own, so whoever opens something calls this first.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)


def ignore_signals() -> None:
    """From here on runs are closed: a signal that is sent again must not cut that short."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    raise KeyboardInterrupt(signal.Signals(number).name)
