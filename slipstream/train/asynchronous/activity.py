"""When the parts of an asynchronous training were at work, and how much of that was at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Span = tuple[float, float]  # from and to, in seconds of one clock


class Activity:
    """Spans in which somebody worked. One thread works; another may ask meanwhile."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._since: float | None = None
        self._rest_s = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The block is work."""
        with self._lock:
            self._since = self._now_s()
        try:
            yield
        finally:
            with self._lock:
                assert self._since is not None
                self._spans.append((self._since, self._now_s()))
                self._since = None

    def rested(self, seconds: float) -> None:
        """So much of the last work was none: one of several engines had nothing to do."""
        with self._lock:
            self._rest_s += seconds

    def take_rest(self) -> float:
        """What was `rested` since the last call of this, in seconds."""
        with self._lock:
            rest_s, self._rest_s = self._rest_s, 0.0
        return rest_s

    def between(self, start_s: float, end_s: float) -> list[Span]:
        """The work between two times, that which goes on included."""
        with self._lock:
            going_on = [] if self._since is None else [(self._since, self._now_s())]
            found = [_cut(span, start_s, end_s) for span in (*self._spans, *going_on)]
        return [span for span in found if span[1] > span[0]]

    def forget(self, end_s: float) -> None:
        """Nobody asks for what lies before this time any more."""
        with self._lock:
            self._spans = [span for span in self._spans if span[1] > end_s]


def total_s(spans: Sequence[Span]) -> float:
    """Their lengths together."""
    return sum(end - start for start, end in spans)


def common_s(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """How long both went on at once."""
    cuts = [_cut(span, *other) for span in spans for other in others]
    return sum(max(0.0, end - start) for start, end in cuts)


def _cut(span: Span, start_s: float, end_s: float) -> Span:
    return max(span[0], start_s), min(span[1], end_s)
