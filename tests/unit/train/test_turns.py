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


@pytest.mark.parametrize(
    ("members", "num_steps", "order"),
    [
        ({"a": (0, 3), "b": (0, 1), "c": (0, 3)}, 1, "a0 b0 c0 c1 a1 a2 c2"),
        ({"a": (0, 5), "b": (0, 5)}, 2, "a0 a1 b0 b1 b2 b3 a2 a3 a4 b4"),
        ({"a": (2, 4), "b": (0, 4)}, 1, "b0 b1 a2 b2 b3 a3"),
    ],
    ids=["one is done before the others", "turns of several steps", "one that resumes from an older step catches up"],
)
def test_steps_and_their_order_alternate(members: dict[str, tuple[int, int]], num_steps: int, order: str) -> None:
    taken: list[str] = []
    runs = {name: steps(num, taken, name, first=first) for name, (first, num) in members.items()}
    assert in_turn(runs, num_steps=num_steps) == {name: num for name, (_, num) in members.items()}
    assert taken == order.split()


@pytest.mark.parametrize(
    ("first", "num_steps", "order"), [(0, 1, "early0 late0 early1"), (5, 8, "early5 early6 late5")]
)
def test_no_step_begins_before_all_are_ready(first: int, num_steps: int, order: str) -> None:
    """Nor one in the middle of a turn, from which both resume."""
    taken: list[str] = []

    def late(turn: Turn) -> None:
        time.sleep(0.2)
        taken.append("ready")
        steps(first + 1, taken, "late", first=first)(turn)

    in_turn({"early": steps(first + 2, taken, "early", first=first), "late": late}, num_steps=num_steps)
    assert taken == ["ready", *order.split()]


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

    found = in_turn({"a": steps(9, taken, "a"), "b": fails}, needed=["b"])
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


@pytest.mark.parametrize("waits_s", [0.0, 0.05])
def test_a_stop_wakes_whoever_waits_and_afterwards_nobody_waits_for_ever(waits_s: float) -> None:
    turns = Turns(["a", "b"])
    stop = threading.Timer(waits_s, turns.stop)
    stop.start()
    if not waits_s:
        stop.join()
    with pytest.raises(Stopped, match=r"^b waits for a turn that will not come$"):
        turns.wait("b", 0)
