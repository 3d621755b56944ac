"""Several trainers on one machine, one step each in turn: whatever slows the machine slows all of them alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class Abandoned(RuntimeError):  # noqa: N818  # what happened to the others
    """Another one failed, so no turn will come."""


class Turns:
    """A ring of names, of which one is at work."""

    def __init__(self, names: list[str]) -> None:
        self._changed = threading.Condition()
        self._ring = list(names)
        self._is_broken = False

    def wait(self, name: str) -> None:
        """Until it is the turn of `name`.

        Raises:
            Abandoned: another one failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_broken or self._ring[0] == name)
            if self._is_broken:
                raise Abandoned(f"{name} waits for a turn that will not come")

    def pass_on(self, name: str) -> None:
        """The turn of `name` is over: the next one's begins."""
        with self._changed:
            assert self._ring[0] == name, f"it is the turn of {self._ring[0]}, not of {name}"
            self._ring.append(self._ring.pop(0))
            self._changed.notify_all()

    @contextmanager
    def member(self, name: str) -> Iterator[None]:
        """After the block `name` takes no more turns; if it fails, nobody does."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._is_broken = True
                self._changed.notify_all()
            raise
        with self._changed:
            self._ring.remove(name)
            self._changed.notify_all()


def in_turn(members: Mapping[str, Callable[[Turns, str], Any]]) -> dict[str, Any]:
    """Run all of them, each in a thread of its own; what each returns, by name.

    Args:
        members: each waits for its turn before a step and passes it on after it.
    Raises:
        Exception: of the one that failed first.
    """
    turns = Turns(list(members))

    def run(name: str) -> Any:
        with turns.member(name):
            return members[name](turns, name)

    with ThreadPoolExecutor(len(members)) as pool:
        started = {name: pool.submit(run, name) for name in members}
    errors = [error for each in started.values() if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Abandoned)):
        raise error
    return {name: each.result() for name, each in started.items()}
