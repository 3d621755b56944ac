"""Keeping engines warm between the blocks that use them.

Starting an engine takes longer than much of what is then asked of it, so a process that runs several stages one after
another may hand an engine on: the next user refits it instead of starting its own. Off by default, for an idle engine
holds its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")


class IdleEngines(Generic[E]):
    """Engines that nobody uses, by what they were started with; the longest idle one goes first. Safe in threads."""

    def __init__(self, *, is_alive: Callable[[E], bool], close: Callable[[E], None]) -> None:
        self._is_alive = is_alive
        self._close = close
        self._engines: list[tuple[str, E]] = []  # longest idle first
        self._lock = threading.Lock()

    def take(self, key: str) -> E | None:
        """An idle engine that was started with `key`, None if there is none; dead ones are dropped on the way."""
        while True:
            with self._lock:
                found = [index for index, (kept, _) in enumerate(self._engines) if kept == key]
                if not found:
                    return None
                _, engine = self._engines.pop(found[-1])
            if self._is_alive(engine):
                return engine
            self._close(engine)

    def put(self, key: str, engine: E, *, capacity: int) -> None:
        """Keep `engine` for the next user; beyond `capacity` idle ones the longest idle are closed."""
        with self._lock:
            self._engines.append((key, engine))
            surplus = [self._engines.pop(0)[1] for _ in range(len(self._engines) - capacity)]
        for longest_idle in surplus:
            self._close(longest_idle)
