from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from slipstream.train.turns import Stopped, Turn, Turns, in_turn


def steps(num: int, taken: list[str], name: str, *, first: int = 0) -> Callable[[Turn], int]:
    def run(turn: Turn) -> int:
        for step in range(first, num):
            turn.begin(step)
            taken.append(f"{name}{step}")
        return num

    return run


def test_steps_alternate_in_an_order_that_alternates_and_one_that_is_done_is_passed_over() -> None:
    taken: list[str] = []

    assert in_turn({name: steps(num, taken, name) for name, num in (("a", 3), ("b", 1), ("c", 3))}) == {
        "a": 3,
        "b": 1,
        "c": 3,
    }
    assert taken == ["a0", "b0", "c0", "c1", "a1", "a2", "c2"]


def test_a_turn_may_be_of_several_steps() -> None:
    taken: list[str] = []
    in_turn({name: steps(5, taken, name) for name in "ab"}, num_steps=2)
    assert taken == ["a0", "a1", "b0", "b1", "b2", "b3", "a2", "a3", "a4", "b4"]


def test_one_that_resumes_from_an_older_step_catches_up_first() -> None:
    taken: list[str] = []
    in_turn({"a": steps(4, taken, "a", first=2), "b": steps(4, taken, "b")})
    assert taken == ["b0", "b1", "a2", "b2", "b3", "a3"]


def test_no_step_begins_before_all_are_ready() -> None:
    taken: list[str] = []
    is_ready = threading.Event()

    def late(turn: Turn) -> None:
        is_ready.wait(0.2)
        taken.append("ready")
        steps(1, taken, "late")(turn)

    in_turn({"early": steps(2, taken, "early"), "late": late})
    assert taken == ["ready", "early0", "late0", "early1"]


def test_no_turn_begins_while_another_one_lasts() -> None:
    at_work: list[str] = []

    def member(turn: Turn) -> None:
        for step in range(3):
            turn.begin(step)
            assert at_work == []
            at_work.append(turn.name)
            time.sleep(0.01)
            at_work.remove(turn.name)

    assert set(in_turn(dict.fromkeys("abc", member)).values()) == {None}


def test_the_others_go_on_without_one_that_failed_in_its_turn_or_before_it() -> None:
    taken: list[str] = []
    error = ValueError("no memory")

    def fails(turn: Turn) -> None:
        turn.begin(0)
        raise error

    def never_starts(turn: Turn) -> None:
        raise error

    found = in_turn({"a": fails, "b": steps(2, taken, "b"), "c": never_starts})
    assert found == {"a": error, "b": 2, "c": error}
    assert taken == ["b0", "b1"]


def test_members_that_belong_together_end_with_the_first_that_fails() -> None:
    taken: list[str] = []

    def fails(turn: Turn) -> None:
        turn.begin(0)
        turn.begin(1)
        raise ValueError("no memory")

    found = in_turn({"a": steps(9, taken, "a"), "b": fails}, together=True)
    assert taken == ["a0"]
    assert isinstance(found["a"], Stopped)
    assert isinstance(found["b"], ValueError)


def test_a_turn_that_failed_is_still_there_when_it_is_begun_again() -> None:
    taken: list[str] = []

    def fails_once(turn: Turn) -> None:
        for step in (0, 1, 0, 1):
            turn.begin(step)
            taken.append(f"a{step}")

    in_turn({"a": fails_once, "b": steps(2, taken, "b")})
    assert taken == ["a0", "b0", "b1", "a1", "a0", "a1"]


def test_after_a_stop_nobody_waits_for_ever() -> None:
    turns = Turns(["a", "b"])
    turns.stop()
    with pytest.raises(Stopped, match=r"^b waits for a turn that will not come$"):
        turns.wait("b", 0)


def test_a_stop_wakes_whoever_waits() -> None:
    turns, found = Turns(["a", "b"]), list[BaseException]()

    def wait() -> None:
        try:
            turns.wait("b", 0)
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
    turns.wait("b", 0)
    turns.wait("b", 1)
