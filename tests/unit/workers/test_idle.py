"""Keeping engines warm."""

from __future__ import annotations

from slipstream.workers.idle import Idle


class Pool:
    """Idle engines that are names; notes which were closed."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.closed: list[str] = []
        self.idle = Idle[str](is_alive=lambda name: name not in self.dead, close=self.closed.append)


def test_an_engine_comes_back_only_to_who_asks_for_its_settings() -> None:
    pool = Pool()
    pool.idle.put("k=0", "a", capacity=2)

    assert pool.idle.take("k=5") is None
    assert pool.idle.take("k=0") == "a"
    assert pool.idle.take("k=0") is None
    assert pool.closed == []


def test_beyond_the_capacity_the_longest_idle_is_closed() -> None:
    pool = Pool()
    for key, name in (("k=1", "a"), ("k=2", "b"), ("k=3", "c")):
        pool.idle.put(key, name, capacity=2)

    assert pool.closed == ["a"]
    assert pool.idle.take("k=1") is None
    assert pool.idle.take("k=3") == "c"


def test_a_capacity_of_none_closes_at_once() -> None:
    pool = Pool()
    pool.idle.put("k=0", "a", capacity=0)

    assert pool.closed == ["a"]


def test_an_engine_that_died_while_idle_is_not_given_out() -> None:
    pool = Pool()
    pool.idle.put("k=0", "a", capacity=2)
    pool.idle.put("k=0", "b", capacity=2)
    pool.dead.add("b")

    assert pool.idle.take("k=0") == "a"
    assert pool.closed == ["b"]
