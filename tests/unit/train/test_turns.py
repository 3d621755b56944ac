from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from slipstream.train.turns import Stopped, Turn, Turns, in_turn


def steps(num: int, taken: list[str], name: str) -> Callable[[Turn], int]:
    def run(turn: Turn) -> int:
        for _ in range(num):
            turn.begin()
            taken.append(name)
            turn.end()
        return num

    return run


def test_steps_alternate_and_one_that_is_done_is_passed_over() -> None:
    taken: list[str] = []

    assert in_turn({name: steps(num, taken, name) for name, num in (("a", 3), ("b", 1), ("c", 3))}) == {
        "a": 3,
        "b": 1,
        "c": 3,
    }
    assert taken == ["a", "b", "c", "a", "c", "a", "c"]


def test_no_step_begins_before_all_are_ready() -> None:
    taken: list[str] = []
    is_ready = threading.Event()

    def late(turn: Turn) -> None:
        is_ready.wait(0.2)
        taken.append("ready")
        steps(1, taken, "late")(turn)

    in_turn({"early": steps(2, taken, "early"), "late": late})
    assert taken == ["ready", "early", "late", "early"]


def test_the_others_go_on_without_one_that_failed_in_its_turn_or_before_it() -> None:
    taken: list[str] = []
    error = ValueError("no memory")

    def fails(turn: Turn) -> None:
        turn.begin()
        raise error

    def never_starts(turn: Turn) -> None:
        raise error

    found = in_turn({"a": fails, "b": steps(2, taken, "b"), "c": never_starts})
    assert found == {"a": error, "b": 2, "c": error}
    assert taken == ["b", "b"]


def test_a_turn_that_failed_is_still_there_when_it_is_begun_again() -> None:
    turns = Turns(["a"])
    turns.wait("a")
    turns.wait("a")
    turns.pass_on("a")


def test_after_a_stop_nobody_waits_for_ever() -> None:
    turns = Turns(["a", "b"])
    turns.stop()
    with pytest.raises(Stopped, match=r"^b waits for a turn that will not come$"):
        turns.wait("b")


def test_a_stop_wakes_whoever_waits() -> None:
    turns, found = Turns(["a", "b"]), list[BaseException]()

    def wait() -> None:
        try:
            turns.wait("b")
        except Stopped as stopped:
            found.append(stopped)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.05)  # it waits by then
    turns.stop()
    thread.join(5.0)
    assert len(found) == 1


def test_one_that_left_before_it_asked_for_a_turn_is_not_waited_for() -> None:
    turns = Turns(["a", "b"])
    turns.leave("a")
    turns.wait("b")
    turns.pass_on("b")
    turns.wait("b")


def test_a_turn_that_is_not_ones_own_cannot_be_passed_on() -> None:
    with pytest.raises(AssertionError, match="turn of a, not of b"):
        Turns(["a", "b"]).pass_on("b")
