"""Keeping processes warm between the blocks that use them.

Starting an engine or a learner takes longer than much of what is then asked of it, so a process that runs several
stages one after another may hand one on: the next user gives it other weights instead of starting its own. Off by
default, for an idle process holds its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")


class Idle(Generic[E]):
    """Engines or learners that nobody uses, by what they were started with; the longest idle one goes first.

    Safe in threads.
    """

    def __init__(self, *, is_alive: Callable[[E], bool], close: Callable[[E], None]) -> None:
        self._is_alive = is_alive
        self._close = close
        self._idle: list[tuple[str, E]] = []  # longest idle first
        self._lock = threading.Lock()

    def take(self, key: str) -> E | None:
        """An idle one that was started with `key`, None if there is none; dead ones are dropped on the way."""
        while True:
            with self._lock:
                found = [index for index, (kept, _) in enumerate(self._idle) if kept == key]
                if not found:
                    return None
                _, process = self._idle.pop(found[-1])
            if self._is_alive(process):
                return process
            self._close(process)

    def put(self, key: str, process: E, *, capacity: int) -> None:
        """Keep `process` for the next user; beyond `capacity` idle ones the longest idle are closed."""
        with self._lock:
            self._idle.append((key, process))
            surplus = [self._idle.pop(0)[1] for _ in range(len(self._idle) - capacity)]
        for longest_idle in surplus:
            self._close(longest_idle)
