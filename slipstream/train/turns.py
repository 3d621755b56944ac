"""Several trainers on one machine, a step or a few of each in turn: whatever slows the machine slows all of them alike.

The turn is that of the member that is furthest behind. Among equals the order is that of their names, and the reverse
after every turn: of two arms a pair of turns is begun by one and the next pair by the other. A member that resumed from
an older checkpoint so catches up first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any


class Stopped(BaseException):  # an interrupt: nothing may take it for a failure
    """The whole was interrupted, or another member failed, so no turn will come."""


class Turns:
    """Members of which one is at work. A turn begins when all of them wait for theirs."""

    def __init__(self, names: Sequence[str]) -> None:
        self._changed = threading.Condition()
        self._order = list(names)
        self._waiting: dict[str, int] = {}  # the turn that each waits for
        self._is_stopped = False

    def wait(self, name: str, number: int) -> None:
        """End the turn of `name`, if it has one, and wait until its turn `number` has come.

        Raises:
            Stopped: `stop` was called.
        """
        with self._changed:
            self._waiting[name] = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped or self._next() == name)
            if self._is_stopped:
                raise Stopped(f"{name} waits for a turn that will not come")
            del self._waiting[name]

    def leave(self, name: str) -> None:
        """Take `name` out: nobody waits for it any more."""
        with self._changed:
            self._order.remove(name)
            self._waiting.pop(name, None)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the waits of all members: there is no further turn."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _next(self) -> str | None:
        """The member whose turn is next; None while one is at work, or has not come yet."""
        if len(self._waiting) < len(self._order):
            return None
        number = min(self._waiting.values())
        behind = [name for name in self._order if self._waiting[name] == number]
        return behind[-1 if number % 2 else 0]


@dataclass(frozen=True, slots=True)
class Turn:
    """The turns of one member, of `num_steps` steps each."""

    turns: Turns
    name: str
    num_steps: int = 1

    def begin(self, step: int) -> None:
        """Wait until it is the turn of `step`, unless that goes on with the one before; repeated, it is still there."""
        if self.begins_with(step):
            self.turns.wait(self.name, step // self.num_steps)

    def begins_with(self, step: int) -> bool:
        """Whether a turn begins with this step; before it the others had theirs."""
        return step % self.num_steps == 0


def in_turn(
    members: Mapping[str, Callable[[Turn], Any]], *, num_steps: int = 1, together: bool = False
) -> dict[str, Any]:
    """Run all members, each in a thread of its own; returns results, or the errors that ended them, by name.

    Args:
        members: each begins its turn before a step.
        num_steps: of a turn.
        together: a member that fails ends the others before their next turn; if not, they go on without it.
    """
    turns = Turns(list(members))

    def run(name: str) -> Any:
        try:
            return members[name](Turn(turns, name, num_steps))
        except BaseException:
            if together:
                turns.stop()
            raise
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
