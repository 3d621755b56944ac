"""Which engine has which groups."""

from __future__ import annotations

from slipstream.engine.requests import GroupRequest
from slipstream.types import Prompt
from slipstream.workers.ledger import Ledger


def request(index: int, *seeds: int) -> GroupRequest:
    return GroupRequest(index=index, prompt=Prompt(id=str(index), text="", token_ids=(2,), answer=""), seeds=seeds)


def indices(given: dict[str, list[GroupRequest]]) -> dict[str, list[int]]:
    return {engine: [group.index for group in groups] for engine, groups in given.items()}


def test_each_group_goes_to_the_engine_with_the_fewest_rollouts() -> None:
    ledger = Ledger()

    # a takes 4, b takes 2, then 2 more, then both have 4 and the first is asked.
    given = ledger.place([request(0, 1, 2, 3, 4), request(1, 1, 2), request(2, 1, 2), request(3, 1)], ["a", "b"])

    assert indices(given) == {"a": [0, 3], "b": [1, 2]}
    ledger.complete([0, 3])
    assert indices(ledger.place([request(4, 1)], ["a", "b"])) == {"a": [4]}


def test_what_an_engine_has_already_counts() -> None:
    ledger = Ledger()
    ledger.place([request(0, 1, 2)], ["a", "b"])

    assert indices(ledger.place([request(1, 1)], ["a", "b"])) == {"b": [1]}


def test_what_a_lost_engine_had_is_taken_once_and_what_came_back_is_not() -> None:
    ledger = Ledger()
    ledger.place([request(0, 1), request(1, 1), request(2, 1), request(3, 1)], ["a", "b"])
    ledger.complete([0])

    assert [group.index for group in ledger.take(["a"])] == [2]
    assert ledger.take(["a"]) == ()
    assert [group.index for group in ledger.requests] == [1, 3]


def test_other_seeds_are_told_to_the_engine_that_has_the_group_and_a_group_that_came_back_is_passed_over() -> None:
    ledger = Ledger()
    ledger.place([request(0, 1, 2), request(1, 3, 4)], ["a", "b"])

    told = ledger.reseed([7, 1], lambda group: tuple(seed + 10 for seed in group.seeds))

    assert told == {"b": {1: (13, 14)}}
    assert [group.seeds for group in ledger.requests] == [(1, 2), (13, 14)]
