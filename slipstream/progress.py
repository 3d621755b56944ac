"""How far long work is: a live bar on a terminal, now and then a plain line in a log, with rate and time left."""

from __future__ import annotations

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from slipstream import logs

logger = logging.getLogger(__name__)

_REDRAW_S = 0.2
_LOG_S = 10.0
_WINDOW_S = 30.0
_BAR_WIDTH = 24


@dataclass
class Pace:
    """Rate over the last half minute. It starts with the first step, which pays for what is started on first use."""

    window_s: float = _WINDOW_S
    _points: deque[tuple[float, int]] = field(default_factory=deque)  # (time in s, how many are done)

    def add(self, now_s: float, done: int) -> None:
        """Note that `done` are done now; the oldest point kept is the last one before the window, or the first."""
        self._points.append((now_s, done))
        while len(self._points) > 2 and self._points[1][0] <= now_s - self.window_s:
            self._points.popleft()

    def per_s(self) -> float | None:
        """How many a second; None before anything has moved."""
        if len(self._points) < 2:
            return None
        (start_s, first), (end_s, last) = self._points[0], self._points[-1]
        return (last - first) / (end_s - start_s) if end_s > start_s and last > first else None


class Progress:
    """Counts towards `total`; shows a bar through `show`, or lines through `log` where there is no terminal."""

    def __init__(
        self,
        task: str,
        *,
        total: int,
        unit: str,
        done: int = 0,
        show: Callable[[str], None] | None = None,
        log: Callable[[str], None] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done`: where resumed work goes on. `show` gets the status line, `log` a line for the log; None: neither."""
        self._task, self._total, self._unit = task, total, unit
        self._done = done
        self._show, self._log, self._now_s = show, log, now_s
        self._pace = Pace()
        self._due_s = now_s()  # the first step shows at once
        if show is not None:
            show(self.bar(""))

    def advance(self, num: int = 1, text: str = "") -> None:
        """`num` more are done; `text` says what is known of the last one."""
        now_s = self._now_s()
        self._done = min(self._done + num, self._total)
        self._pace.add(now_s, self._done)
        if now_s < self._due_s and self._done < self._total:
            return
        if self._show is not None:
            self._show(self.bar(text))
            self._due_s = now_s + _REDRAW_S
        elif self._log is not None:
            self._log(self.line(text))
            self._due_s = now_s + _LOG_S

    def close(self) -> None:
        """Free the status line."""
        if self._show is not None:
            self._show("")

    def left(self) -> str:
        """Time left in words; empty before there is a rate, and at the end."""
        per_s = self._pace.per_s()
        if per_s is None or self._done >= self._total:
            return ""
        return f"{duration((self._total - self._done) / per_s)} left"

    def line(self, text: str) -> str:
        """For a log."""
        return ", ".join(filter(None, (f"{self._task}: {self._count()}", self._rate(), self.left(), text)))

    def bar(self, text: str) -> str:
        """For a terminal."""
        filled = _BAR_WIDTH * self._done // max(self._total, 1)
        drawn = "#" * filled + "." * (_BAR_WIDTH - filled)
        words = ", ".join(filter(None, (self._count(), self._rate(), self.left(), text)))
        return f"{self._task} [{drawn}] {words}"

    def _count(self) -> str:
        return f"{self._unit} {self._done}/{self._total}"

    def _rate(self) -> str:
        per_s = self._pace.per_s()
        if per_s is None:
            return ""
        return f"{per_s:.3g} {self._unit}s/s" if per_s >= 1 else f"{1 / per_s:.3g} s/{self._unit}"


def duration(seconds: float) -> str:
    """`0:07`, `12:30` or `3:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def progress(task: str, *, total: int, unit: str, done: int = 0, in_log: bool = True) -> Iterator[Progress]:
    """Follow work for the span of the block.

    Args:
        done: how many of `total` an earlier attempt did.
        in_log: False where the caller writes a line of its own for each step: only a terminal gets a bar.
    """
    handler = logs.status_handler()
    show = None if handler is None else partial(_show, handler)
    bar = Progress(task, total=total, unit=unit, done=done, show=show, log=logger.info if in_log else None)
    try:
        yield bar
    finally:
        bar.close()


def _show(handler: logs.StatusHandler, status: str) -> None:
    """Within one line: a terminal cannot rewrite two."""
    handler.show(status[: shutil.get_terminal_size().columns - 1])
