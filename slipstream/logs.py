"""One compact log format for every process of ours: our progress at INFO, other libraries only when they warn."""

from __future__ import annotations

import logging
import threading
import warnings
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
