"""Several trainers on one machine, one step each in turn: whatever slows the machine slows all of them alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol


class Turn(Protocol):
    """When one of several trainers may work."""

    def begin(self) -> None:
        """Wait until the turn has come; it is still there after a step that failed."""
        ...

    def end(self) -> None:
        """The step is done: it is the next one's turn."""
        ...


class Alone:
    """The turns of one that shares them with nobody."""

    def begin(self) -> None:
        """At once."""

    def end(self) -> None:
        """Nobody waits."""


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
        """Until it is the turn of `name`.

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
        """The turn of `name` is over."""
        with self._changed:
            assert self._ring[0] == name, f"it is the turn of {self._ring[0]}, not of {name}"
            self._ring.append(self._ring.pop(0))
            self._changed.notify_all()

    def leave(self, name: str) -> None:
        """`name` takes no more turns."""
        with self._changed:
            self._ring.remove(name)
            self._expected.discard(name)
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody takes another turn."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTurn:
    """The turns of one member."""

    turns: Turns
    name: str

    def begin(self) -> None:
        """See `Turn.begin`."""
        self.turns.wait(self.name)

    def end(self) -> None:
        """See `Turn.end`."""
        self.turns.pass_on(self.name)


def in_turn(members: Mapping[str, Callable[[Turn], Any]]) -> dict[str, Any]:
    """Run all members, each in a thread of its own; what each returned, or the error that ended it, by name.

    A member that fails takes no more turns; the others go on.

    Args:
        members: each begins its turn before a step and ends it after it.
    """
    turns = Turns(list(members))

    def run(name: str) -> Any:
        try:
            return members[name](OwnTurn(turns=turns, name=name))
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
