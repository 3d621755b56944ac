"""Threads of an asynchronous training: what they share and hand to each other, and how all of them end together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
_END_S = 0.5  # for threads to see that all is over; one that is inside a call is left to finish it
_POLL_S = 0.2  # a thread that only waits sees no interrupt that another thread was given


class Ended(RuntimeError):  # noqa: N818  # what it says, not that anything is wrong
    """The training has ended, so what a thread waits for will not come."""


class ThreadGroup:
    """One lock for all that the threads share, and the end of all of them.

    Every change and the end wake all that wait: nobody waits for a thread that is gone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_over = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def update(self, change: Callable[[], T]) -> T:
        """Call `change` under the lock, and have everybody look again.

        Raises:
            Ended: the training has ended.
        """
        with self._changed:
            self._require_going_on()
            result = change()
            self._changed.notify_all()
            return result

    def wait_for(self, take: Callable[[], T | None]) -> T:
        """What `take` returns, as soon as that is not None; it runs under the lock, and may change what is shared.

        Raises:
            Ended: the training has ended.
        """
        with self._changed:
            while True:
                self._require_going_on()
                taken = take()
                if taken is not None:
                    self._changed.notify_all()
                    return taken
                self._changed.wait()

    def run(self, loops: Mapping[str, Callable[[], None]], *, finite: str) -> None:
        """Run the loops, each in a thread, until the `finite` one is done or any of them fails. Once only.

        A thread that is inside a call of its own is not waited for: `join` does that.

        Raises:
            BaseException: what the first loop that failed raised, or an interrupt of the calling thread.
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
        """Wait for threads that were inside a call when all ended: whatever they called is idle then."""
        for thread in self._threads:
            thread.join()

    def _guarded(self, name: str, loop: Callable[[], None], is_finite: bool) -> None:
        try:
            loop()
        except Ended:
            return
        except BaseException as error:  # noqa: BLE001  # the thread that waits raises it
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
    """What one thread hands to another, in order. The lag bounds what is under way at once, so no put has to wait.

    All methods raise `Ended` when the training has ended.
    """

    def __init__(self, group: ThreadGroup, items: Iterable[T] = ()) -> None:
        self._group = group
        self._items = list(items)

    @property
    def items(self) -> tuple[T, ...]:
        """All that wait; for what runs under the group's lock."""
        return tuple(self._items)

    def put(self, item: T) -> None:
        """Add an item; never waits."""
        self._group.update(lambda: self._items.append(item))

    def take(self) -> T:
        """The next item, once there is one."""
        return self._group.wait_for(lambda: (self._items.pop(0),) if self._items else None)[0]

    def poll(self) -> T | None:
        """The next item, None if there is none yet."""
        return self._group.update(lambda: self._items.pop(0) if self._items else None)

    def drain(self) -> list[T]:
        """All items there are."""

        def taken() -> list[T]:
            items, self._items = self._items, []
            return items

        return self._group.update(taken)

    def pick(self, choose: Callable[[Sequence[T]], Sequence[T] | None]) -> list[T]:
        """Take out what `choose` picks of those that wait, once it picks anything."""

        def picked() -> list[T] | None:
            chosen = choose(self.items)
            if chosen is None:
                return None
            taken = {id(each) for each in chosen}
            self._items = [each for each in self._items if id(each) not in taken]
            return list(chosen)

        return self._group.wait_for(picked)

    def wait_for(self, count: int) -> tuple[T, ...]:
        """All that wait, once they are at least so many; they stay."""
        return self._group.wait_for(lambda: (self.items,) if len(self._items) >= count else None)[0]
