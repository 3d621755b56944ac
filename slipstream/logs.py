"""One compact log format for every process of ours: our progress at INFO, other libraries only when they warn."""

from __future__ import annotations

import logging
import warnings
from typing import TextIO

_ERASE = "\r\x1b[2K"
_OURS = "slipstream"


class StatusHandler(logging.StreamHandler[TextIO]):
    """Log lines, and below them one status line that is rewritten in place where the stream is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._status = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log line; a status line makes room for it and comes back below."""
        status = self._status
        if status:
            self.stream.write(_ERASE)
        super().emit(record)
        if status:
            self.show(status)

    def show(self, status: str) -> None:
        """Put `status` in the place of the last one; an empty one leaves the line free."""
        self.acquire()
        try:
            self._status = status
            self.stream.write(_ERASE + status)
            self.flush()
        finally:
            self.release()


def configure() -> None:
    """Show our progress on standard error. Safe to call again."""
    handler = StatusHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    ours = logging.getLogger(_OURS)
    ours.handlers[:] = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for name in ("mlflow", "alembic", "httpx", "datasets", "speculators", "megatron", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron|apex|flytekit")


def status_handler() -> StatusHandler | None:
    """The handler that can show a status line: None before `configure`, and where nobody watches a terminal."""
    for handler in logging.getLogger(_OURS).handlers:
        if isinstance(handler, StatusHandler) and handler.stream.isatty():
            return handler
    return None
