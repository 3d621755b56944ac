"""A command and all processes that come from it: they end with it, or within seconds of an interrupt.

Linux alone: orphans of the command become ours (a subreaper's), so that nothing escapes by starting a session of its
own, and the command is told when we die. Nobody else's process is ever touched: only descendants are ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

GRACE_S = 3.0
"""From an interrupt to the kill: the command may close its MLflow runs meanwhile."""

_KILL_S = 1.5  # for the kernel to end what was killed
_ASK_S = 0.75  # it is asked again so often: Python drops what a handler raises within some callbacks
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Child(Protocol):
    """The started command, as far as waiting for it goes."""

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        ...

    def terminate(self) -> None:
        """Ask it to end, with SIGTERM."""
        ...


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
            status = wait(child, caught)
        finally:
            end_descendants()
    interrupted = bool(caught)
    return Outcome(pid=child.pid, status=128 + caught[0] if interrupted else status or 0, interrupted=interrupted)


def wait(
    child: Child,
    caught: Sequence[int],
    *,
    grace_s: float = GRACE_S,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int | None:
    """Wait for `child`; after the first signal in `caught` it is asked to end and has `grace_s` to do so.

    Returns:
        Its exit status, None if it still runs: the grace is over, or there was a second signal.
    """
    interrupted_s: float | None = None
    num_asked = 0
    while (status := child.poll()) is None:
        if caught:
            interrupted_s = now_s() if interrupted_s is None else interrupted_s
            passed_s = now_s() - interrupted_s
            if len(caught) > 1 or passed_s >= grace_s:
                return None
            if passed_s >= num_asked * _ASK_S:
                child.terminate()
                num_asked += 1
        sleep(_POLL_S)
    return status


def end_descendants() -> None:
    """Kill all processes that come from this one, and again those that they started meanwhile, until none is left."""
    me = psutil.Process()
    deadline_s = time.monotonic() + _KILL_S
    while (descendants := me.children(recursive=True)) and time.monotonic() < deadline_s:
        for process in descendants:
            _kill(process)
        _reap()
        time.sleep(_POLL_S / 5)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):  # it was quicker
        process.kill()


def _reap() -> None:
    """Take leave of dead children; without it they stay as zombies, which `children` lists."""
    with suppress(ChildProcessError):  # there are none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


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
