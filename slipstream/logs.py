"""Log format of every Slipstream process, and progress of long work as a bar or as log lines.

Slipstream logs progress at INFO; other libraries log only warnings or errors. A terminal shows a live bar, a log gets a
line now and then, with rate and time left.
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
tqdm.set_lock(threading.RLock())  # tqdm's own lock spans processes, and costs each a semaphore
tqdm.monitor_interval = 0  # no thread that redraws bars


class BarHandler(logging.StreamHandler[TextIO]):
    """Log handler that writes lines above a bar on the same terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log line."""
        with tqdm.external_write_mode(self.stream):
            super().emit(record)


def configure() -> None:
    """Log progress to standard error. Repeated calls are safe."""
    handler = BarHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    ours = logging.getLogger(_OURS)
    ours.handlers[:] = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for name in ("mlflow", "alembic", "httpx", "datasets", "speculators", "megatron", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("flytekit").addFilter(_says_something)
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron|apex|flytekit")


def _says_something(record: logging.LogRecord) -> bool:
    """Drop flytekit's errors of S3 sessions that it leaves open when a pod ends, which mean nothing."""
    return "Unclosed client session" not in record.getMessage() and "Unclosed connector" not in record.getMessage()


logger = logging.getLogger(__name__)

_LOG_S = 10.0
_LINE = "{desc}: {unit} {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left{postfix}"
_BAR = "{desc} [{bar:24}] {unit} {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left{postfix}"


class Progress:
    """Counter on a bar; without a terminal its line can go to a log."""

    def __init__(
        self, bar: tqdm, log: Callable[[str], None] | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._bar, self._log, self._now_s = bar, log, now_s
        self._due_s = now_s()  # the first step is logged at once

    def advance(self, num: int = 1, text: str = "") -> None:
        """Advance by `num`; `text` describes the latest item."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(min(num, self._bar.total - self._bar.n))
        is_done = self._bar.n >= self._bar.total
        if is_done:
            self._bar.refresh()
        if self._log is not None and (is_done or self._now_s() >= self._due_s):
            self._log(str(self._bar))
            self._due_s = self._now_s() + _LOG_S

    def left(self) -> str:
        """Return the time left as text; empty before there is a rate, and at the end."""
        remaining = tqdm.format_meter(**{**self._bar.format_dict, "bar_format": "{remaining}", "ncols": None})
        return "" if remaining == "?" or self._bar.n >= self._bar.total else f"{remaining} left"


@contextmanager
def progress(task: str, *, total: int, unit: str, done: int = 0, in_log: bool = True) -> Iterator[Progress]:
    """Track the progress of work within the block.

    Args:
        done: items that an earlier attempt completed.
        in_log: False where the caller logs each step itself, so that only a terminal shows a bar.
    """
    streams = (each.stream for each in logging.getLogger(_OURS).handlers if isinstance(each, BarHandler))
    stream = next((each for each in streams if each.isatty()), None)
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
            miniters=1,  # otherwise steps slower than the first ones are not drawn
            dynamic_ncols=has_size,
            ncols=ncols,
            nrows=nrows,
        ) as bar,
    ):
        yield Progress(bar, logger.info if in_log and stream is None else None)


def _has_size(stream: TextIO) -> bool:
    """Return False for a terminal of width 0, as in a container without input, where tqdm would hide the bar."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):  # not a terminal
        return True
