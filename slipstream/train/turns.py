"""Several trainers on one machine, one step each in turn: whatever slows the machine slows all of them alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any


class Stopped(BaseException):  # an interrupt: nothing may take it for a failure
    """The whole was interrupted, so no turn will come."""


class Turns:
    """A ring of members, of which one is at work. The first turn begins when all of them wait for theirs."""

    def __init__(self, names: Sequence[str]) -> None:
        self._changed = threading.Condition()
        self._ring = list(names)
        self._expected = set(names)  # that have not asked for a turn yet
        self._is_stopped = False

    def wait(self, name: str) -> None:
        """Wait until it is the turn of `name`.

        Raises:
            Stopped: `stop` was called.
        """
        with self._changed:
            self._expected.discard(name)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped or (not self._expected and self._ring[0] == name))
            if self._is_stopped:
                raise Stopped(f"{name} waits for a turn that will not come")

    def pass_on(self, name: str) -> None:
        """End the turn of `name`."""
        with self._changed:
            assert self._ring[0] == name, f"it is the turn of {self._ring[0]}, not of {name}"
            self._ring.append(self._ring.pop(0))
            self._changed.notify_all()

    def leave(self, name: str) -> None:
        """Take `name` out of the ring."""
        with self._changed:
            self._ring.remove(name)
            self._expected.discard(name)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the waits of all members: there is no further turn."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Turn:
    """The turns of one member of a ring."""

    turns: Turns
    name: str

    def begin(self) -> None:
        """Wait until the turn has come; it is still there after a step that failed."""
        self.turns.wait(self.name)

    def end(self) -> None:
        """Pass the turn on to the next member: the step is done."""
        self.turns.pass_on(self.name)


def in_turn(members: Mapping[str, Callable[[Turn], Any]]) -> dict[str, Any]:
    """Run all members, each in a thread of its own; returns results, or the errors that ended them, by name.

    A member that fails takes no more turns; the others go on.

    Args:
        members: each begins its turn before a step and ends it after it.
    """
    turns = Turns(list(members))

    def run(name: str) -> Any:
        try:
            return members[name](Turn(turns, name))
        finally:
            turns.leave(name)

    with ThreadPoolExecutor(len(members)) as pool:
        started = {name: pool.submit(run, name) for name in members}
        try:
            wait(started.values())
        except BaseException:  # an interrupt: those that wait would wait for ever
            turns.stop()
            raise
    return {name: each.exception() or each.result() for name, each in started.items()}
