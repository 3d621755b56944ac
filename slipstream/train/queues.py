"""Threads of an asynchronous training: their shared lock, the queues between them, and their common end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
_END_S = 0.5  # time for threads to notice the end; a thread inside a call is left to finish it
_POLL_S = 0.2  # period at which the calling thread wakes to see interrupts that another thread received


class Ended(RuntimeError):  # noqa: N818  # a signal between threads, not a failure
    """The training has ended, so nothing further arrives."""


class ThreadGroup:
    """Threads that share one lock and end together.

    Every change and the end wake all waiting threads, so none waits for a thread that is gone: `update` and `wait_for`
    raise `Ended` once the training has ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_over = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def update(self, change: Callable[[], T]) -> T:
        """Call `change` under the lock, and wake all waiting threads."""
        with self._changed:
            self._require_going_on()
            result = change()
            self._changed.notify_all()
            return result

    def wait_for(self, take: Callable[[], T | None]) -> T:
        """Wait until `take` returns a value other than None; it runs under the lock and may change shared state."""
        with self._changed:
            while True:
                self._require_going_on()
                taken = take()
                if taken is not None:
                    self._changed.notify_all()
                    return taken
                self._changed.wait()

    def run(self, loops: Mapping[str, Callable[[], None]], *, finite: str) -> None:
        """Run each loop in a thread until the `finite` one returns, or raise the error of the first that fails.

        Call this once. A thread that is still inside a call is left to finish it; `join` waits for such threads.
        """
        self._threads = [
            threading.Thread(target=self._guarded, args=(name, loop, name == finite), name=name, daemon=True)
            for name, loop in loops.items()
        ]
        try:
            for thread in self._threads:
                thread.start()
            with self._changed:
                while not self._is_over:
                    self._changed.wait(_POLL_S)
        finally:
            self._end(None)
        deadline_s = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait for threads that were inside a call when the group ended; whatever they called is idle then."""
        for thread in self._threads:
            thread.join()

    def _guarded(self, name: str, loop: Callable[[], None], is_finite: bool) -> None:
        try:
            loop()
        except Ended:
            return
        except BaseException as error:  # noqa: BLE001  # the waiting thread raises it
            self._end(error)
            return
        self._end(None if is_finite else RuntimeError(f"the loop {name!r} ended before the training did"))

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            if not self._is_over:
                self._is_over, self._error = True, error
            self._changed.notify_all()

    def _require_going_on(self) -> None:
        if self._is_over:
            raise Ended


class Queue(Generic[T]):
    """Ordered queue between two threads. The lag bounds its length, so `put` never waits.

    All methods raise `Ended` after the end of the training.
    """

    def __init__(self, group: ThreadGroup, items: Iterable[T] = ()) -> None:
        self._group = group
        self._items = list(items)

    @property
    def items(self) -> tuple[T, ...]:
        """All waiting items, for code that holds the group's lock."""
        return tuple(self._items)

    def put(self, item: T) -> None:
        """Append an item."""
        self._group.update(lambda: self._items.append(item))

    def take(self) -> T:
        """Wait for the next item and remove it."""
        return self._group.wait_for(lambda: (self._items.pop(0),) if self._items else None)[0]

    def poll(self) -> T | None:
        """Remove and return the next item; None if the queue is empty."""
        return self._group.update(lambda: self._items.pop(0) if self._items else None)

    def drain(self) -> list[T]:
        """Remove and return all items."""

        def taken() -> list[T]:
            items, self._items = self._items, []
            return items

        return self._group.update(taken)

    def pick(self, choose: Callable[[Sequence[T]], Sequence[T] | None]) -> list[T]:
        """Wait until `choose` selects some of the waiting items; remove and return them."""

        def picked() -> list[T] | None:
            chosen = choose(self.items)
            if chosen is None:
                return None
            taken = {id(each) for each in chosen}
            self._items = [each for each in self._items if id(each) not in taken]
            return list(chosen)

        return self._group.wait_for(picked)

    def wait_for(self, count: int) -> tuple[T, ...]:
        """Wait until at least `count` items are queued; return all of them without removing them."""
        return self._group.wait_for(lambda: (self.items,) if len(self._items) >= count else None)[0]
