"""Turns of several trainers on one machine, one or a few steps each, so that a slow machine slows all of them alike.

The member that is furthest behind is next, so one that resumed from an older checkpoint catches up first. Equal members
follow the order of their names, reversed after every turn: of two arms each begins every second pair of turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any


class Stopped(BaseException):  # like an interrupt: no handler may take it for a failure
    """The run was interrupted, or another member failed, so no further turn comes."""


class Turns:
    """Members of which one works at a time. A turn begins when all of them wait for theirs."""

    def __init__(self, names: Sequence[str]) -> None:
        self._changed = threading.Condition()
        self._order = list(names)
        self._waiting: dict[str, int] = {}  # number of the turn that each member waits for
        self._begun: set[str] = set()  # members that have had a turn
        self._is_stopped = False

    def wait(self, name: str, number: int) -> None:
        """End the turn of `name`, if it has one, and wait for its turn `number`, or raise `Stopped` after `stop`."""
        with self._changed:
            self._waiting[name] = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped or self._next() == name)
            if self._is_stopped:
                raise Stopped(f"{name} waits for a turn that will not come")
            del self._waiting[name]
            self._begun.add(name)

    def has_begun(self, name: str) -> bool:
        """Return True if `name` has had a turn."""
        return name in self._begun

    def leave(self, name: str) -> None:
        """Remove `name`; no member waits for it any more."""
        with self._changed:
            self._order.remove(name)
            self._waiting.pop(name, None)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the waits of all members; no further turn begins."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _next(self) -> str | None:
        """Member whose turn is next; None while one works or has not arrived."""
        if len(self._waiting) < len(self._order):
            return None
        number = min(self._waiting.values())
        behind = [name for name in self._order if self._waiting[name] == number]
        return behind[-1 if number % 2 else 0]


@dataclass(frozen=True, slots=True)
class Turn:
    """The turns of one member, of `num_steps` steps each; with 0 no turn ever begins."""

    turns: Turns
    name: str
    num_steps: int = 1

    def begin(self, step: int) -> None:
        """Wait for the turn of `step` if a turn begins with it; a repeated call keeps the turn.

        A member that resumes in the middle of a turn waits for it too.
        """
        if self.begins_with(step) or (self.num_steps > 0 and not self.turns.has_begun(self.name)):
            self.turns.wait(self.name, step // self.num_steps)

    def begins_with(self, step: int) -> bool:
        """Return True if a turn begins with this step."""
        return self.num_steps > 0 and step % self.num_steps == 0


ALONE = Turn(Turns(()), "", num_steps=0)
"""Turn of a trainer that has its machine alone, and waits for nobody."""


def in_turn(
    members: Mapping[str, Callable[[Turn], Any]], *, num_steps: int = 1, needed: Collection[str] = ()
) -> dict[str, Any]:
    """Run each member in a thread of its own; return results, or the errors that ended them, by name.

    Args:
        members: functions that begin their turn before a step.
        needed: members whose failure ends the others before their next turn; after that of any other they continue.
    """
    turns = Turns(list(members))

    def run(name: str) -> Any:
        try:
            return members[name](Turn(turns, name, num_steps))
        except BaseException:
            if name in needed:
                turns.stop()
            raise
        finally:
            turns.leave(name)

    with ThreadPoolExecutor(len(members)) as pool:
        started = {name: pool.submit(run, name) for name in members}
        try:
            wait(started.values())
        except BaseException:  # after an interrupt, waiting members would never wake
            turns.stop()
            raise
    return {name: each.exception() or each.result() for name, each in started.items()}
