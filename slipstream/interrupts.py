"""SIGINT and SIGTERM alike end a run as an interrupt does: what is open is closed on the way out."""

from __future__ import annotations

import signal
import threading
from types import FrameType


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
