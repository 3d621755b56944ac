"""What people see of long work: one compact log format for every process of ours, and how far a task is.

Our progress is logged at INFO, other libraries only when they warn. A terminal has a live bar, a log a plain line now
and then, with rate and time left.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

_OURS = "slipstream"
tqdm.set_lock(threading.RLock())  # its own is of all processes, and costs each a semaphore
tqdm.monitor_interval = 0  # no thread that redraws bars


class BarHandler(logging.StreamHandler[TextIO]):
    """Log lines; a bar that is drawn on the same terminal makes room for them and comes back below."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log line."""
        with tqdm.external_write_mode(self.stream):
            super().emit(record)


def configure() -> None:
    """Show our progress on standard error. Safe to call again."""
    handler = BarHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    ours = logging.getLogger(_OURS)
    ours.handlers[:] = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for name in ("mlflow", "alembic", "httpx", "datasets", "speculators", "megatron", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron|apex|flytekit")


def terminal() -> TextIO | None:
    """Where a bar can be drawn: None before `configure`, and where nobody watches."""
    for handler in logging.getLogger(_OURS).handlers:
        if isinstance(handler, BarHandler) and handler.stream.isatty():
            return handler.stream
    return None


logger = logging.getLogger(__name__)

_LOG_S = 10.0
_LINE = "{desc}: {unit} {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left{postfix}"
_BAR = "{desc} [{bar:24}] {unit} {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left{postfix}"


class Progress:
    """Counts on a bar; where that is drawn nowhere, its line may go to a log."""

    def __init__(
        self, bar: tqdm, log: Callable[[str], None] | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._bar, self._log, self._now_s = bar, log, now_s
        self._due_s = now_s()  # the first step shows at once

    def advance(self, num: int = 1, text: str = "") -> None:
        """`num` more are done; `text` says what is known of the last one."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(min(num, self._bar.total - self._bar.n))
        is_done = self._bar.n >= self._bar.total
        if is_done:
            self._bar.refresh()
        if self._log is not None and (is_done or self._now_s() >= self._due_s):
            self._log(str(self._bar))
            self._due_s = self._now_s() + _LOG_S

    def left(self) -> str:
        """Time left in words; empty before there is a rate, and at the end."""
        remaining = tqdm.format_meter(**{**self._bar.format_dict, "bar_format": "{remaining}", "ncols": None})
        return "" if remaining == "?" or self._bar.n >= self._bar.total else f"{remaining} left"


@contextmanager
def progress(task: str, *, total: int, unit: str, done: int = 0, in_log: bool = True) -> Iterator[Progress]:
    """Follow work for the span of the block.

    Args:
        done: how many of `total` an earlier attempt did.
        in_log: False where the caller writes a line of its own for each step: only a terminal gets a bar.
    """
    stream = terminal()
    has_size = stream is not None and _has_size(stream)
    ncols, nrows = (None, None) if has_size or stream is None else (79, 24)
    with (
        open(os.devnull, "w") as nowhere,
        tqdm(
            desc=task,
            total=total,
            unit=unit,
            initial=done,
            file=stream or nowhere,
            bar_format=_BAR if stream else _LINE,
            ascii=".#",
            leave=False,
            mininterval=0.2,
            miniters=1,  # else steps that grow slower than the first ones are not drawn
            dynamic_ncols=has_size,
            ncols=ncols,
            nrows=nrows,
        ) as bar,
    ):
        yield Progress(bar, logger.info if in_log and stream is None else None)


def _has_size(stream: TextIO) -> bool:
    """Whether a terminal is wider than nothing, as that of a container without an input is: tqdm would hide the bar."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):  # no terminal after all
        return True
