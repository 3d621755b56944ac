from __future__ import annotations

import pytest

from benchmarks.turns import Turns, in_turn


def test_steps_alternate_and_one_that_is_done_is_passed_over() -> None:
    taken: list[str] = []

    def steps(num: int) -> object:
        def run(turns: Turns, name: str) -> int:
            for _ in range(num):
                turns.wait(name)
                taken.append(name)
                turns.pass_on(name)
            return num

        return run

    assert in_turn({"a": steps(3), "b": steps(1), "c": steps(3)}) == {"a": 3, "b": 1, "c": 3}  # type: ignore[dict-item]
    assert taken == ["a", "b", "c", "a", "c", "a", "c"]


def test_the_error_of_the_one_that_failed_ends_all() -> None:
    def fails(turns: Turns, name: str) -> None:
        turns.wait(name)
        raise ValueError("no memory")

    def waits(turns: Turns, name: str) -> None:
        turns.wait(name)
        turns.pass_on(name)
        turns.wait(name)

    with pytest.raises(ValueError, match="no memory"):
        in_turn({"waits": waits, "fails": fails})


def test_a_turn_that_is_not_ones_own_cannot_be_passed_on() -> None:
    with pytest.raises(AssertionError, match="turn of a, not of b"):
        Turns(["a", "b"]).pass_on("b")
