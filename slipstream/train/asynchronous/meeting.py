"""Where the loops of an asynchronous training wait for each other, and how all of them end when one does."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")
_END_S = 0.5  # for loops to see that all is over; whoever is inside a call is left to finish it
_LOOK_S = 0.2  # a thread that only waits sees no interrupt that another thread was given


class Over(RuntimeError):  # noqa: N818  # what it says, not that anything is wrong
    """The training has ended, so what a loop waits for will not come."""


class Meeting:
    """One lock for all that the loops share, and the end of all of them.

    Whoever waits here is woken by every change and by the end: nobody waits for a loop that is gone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_over = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def change(self, change: Callable[[], T]) -> T:
        """Do something to what is shared, and have everybody look again.

        Raises:
            Over: the training has ended.
        """
        with self._changed:
            self._require_going_on()
            result = change()
            self._changed.notify_all()
            return result

    def wait(self, take: Callable[[], T | None]) -> T:
        """What `take` gives, as soon as that is something; it runs under the lock, and may change what is shared.

        Raises:
            Over: the training has ended.
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

        A thread that is inside a call of its own is not waited for, see `settle`.

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
                    self._changed.wait(_LOOK_S)
        finally:
            self._end(None)
        deadline_s = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait for threads that were inside a call when all ended: whoever they called is at rest then."""
        for thread in self._threads:
            thread.join()

    def _guarded(self, name: str, loop: Callable[[], None], is_finite: bool) -> None:
        try:
            loop()
        except Over:
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
            raise Over


class Handover(Generic[T]):
    """What one loop hands to another, in order. It has no bound of its own: what may be under way at once has."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        """Never waits. Raises `Over`."""
        self._meeting.change(lambda: self._items.append(item))

    def take(self) -> T:
        """The next one, once there is one. Raises `Over`."""
        return self._meeting.wait(lambda: (self._items.popleft(),) if self._items else None)[0]

    def poll(self) -> T | None:
        """The next one, None if there is none yet. Raises `Over`."""
        return self._meeting.change(lambda: self._items.popleft() if self._items else None)

    def drain(self) -> list[T]:
        """All there are. Raises `Over`."""

        def taken() -> list[T]:
            items = list(self._items)
            self._items.clear()
            return items

        return self._meeting.change(taken)
