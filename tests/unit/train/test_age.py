"""Whatever order groups come back in, none grows too old, and a step never has to take more than a batch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.protocol import GenerationResult
from slipstream.rewards.verifier import RewardResult
from slipstream.train.asynchronous import choose_batch, num_missing, overdue
from slipstream.train.pending import Scored


def scored(index: int) -> Scored:
    result = GenerationResult(groups=(), acceptance=None, generation_s=0.0)
    rewards = RewardResult(rewards=(), num_timeouts=0, num_crashes=0)
    return Scored(index=index, result=result, rewards=rewards)


def taken(there: list[int], started: dict[int, int], step: int, *, lag: int, per_step: int) -> list[int] | None:
    chosen = choose_batch([scored(index) for index in there], started, step, lag=lag, per_step=per_step)
    return None if chosen is None else [each.index for each in chosen]


@given(
    lag=st.integers(0, 4),
    per_step=st.integers(1, 4),
    num_steps=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    dies_at=st.none() | st.integers(0, 7),
    restarts=st.booleans(),
)
def test_all_groups_are_taken_once_and_in_time_in_whatever_order_they_come(
    lag: int, per_step: int, num_steps: int, seed: int, dies_at: int | None, restarts: bool
) -> None:
    """Of a training that may die once: what it had begun starts anew under the version of the step that goes on."""
    chance, started, there, trained = random.Random(seed), dict[int, int](), list[int](), list[int]()
    patience = chance.random()  # of steps: whether more comes back before a batch is asked for
    for step in range(num_steps):
        if step == dies_at:
            started = {index: version if index in there else step for index, version in started.items()}
        if restarts:
            for index in overdue(started, step, lag=lag) - set(there):
                started[index] = step
        num_submitted = len(trained) + len(started)
        for index in range(num_submitted, min(step + lag + 1, num_steps) * per_step):
            started[index] = step
        while True:
            under_way = [index for index in started if index not in there]
            missing = num_missing(there, started, step, lag=lag, per_step=per_step)
            chosen = taken(there, started, step, lag=lag, per_step=per_step)
            assert missing <= len(under_way)
            assert chosen is None or not missing
            assert chosen is not None or missing or len(there) < per_step
            if chosen is not None and (not under_way or chance.random() > patience):
                break
            there.append(chance.choice(under_way))
        assert len(set(chosen)) == per_step
        assert all(step - started[index] <= lag for index in chosen)
        trained += chosen
        there = [index for index in there if index not in chosen]
        for index in chosen:
            del started[index]
    assert sorted(trained) == list(range(num_steps * per_step))


def test_a_step_that_only_waits_for_a_batch_of_young_groups_misses_none_that_grew_old() -> None:
    young = dict.fromkeys(range(4), 3)
    assert num_missing([], young, 3, lag=1, per_step=2) == 0
    assert num_missing([], {**young, 4: 2}, 3, lag=1, per_step=2) == 1


def test_a_step_takes_no_young_group_in_place_of_one_that_a_later_step_would_have_no_room_for() -> None:
    """Version 0 has four left and steps 1 and 2 for them: 9 is there, but step 2 could not take three."""
    started = {3: 0, 4: 0, 5: 0, 6: 0, 9: 1, 10: 1}
    assert taken([9, 3, 10], started, 1, lag=2, per_step=2) is None
    assert num_missing([9, 3, 10], started, 1, lag=2, per_step=2) == 1
    assert taken([9, 3, 10, 5], started, 1, lag=2, per_step=2) == [3, 5]


def test_what_is_due_comes_first_then_what_came_first() -> None:
    started = {3: 0, 4: 1, 5: 1, 6: 2, 7: 2}
    assert overdue(started, 2, lag=2) == {3}
    assert overdue(started, 3, lag=2) == {3, 4, 5}
    assert taken([6, 4], started, 2, lag=2, per_step=2) is None  # 3 is not there
    assert num_missing([6, 4], started, 2, lag=2, per_step=2) == 1
    assert taken([6, 4, 3], started, 2, lag=2, per_step=2) == [3, 6]
    assert num_missing([6, 4, 3], started, 2, lag=2, per_step=2) == 0
    assert taken([3], started, 2, lag=2, per_step=2) is None  # no batch yet
    assert num_missing([3], started, 2, lag=2, per_step=2) == 0


def test_without_a_lag_a_step_takes_what_was_submitted_under_its_own_version() -> None:
    started = {0: 0, 1: 0}
    assert overdue(started, 0, lag=0) == {0, 1}
    assert num_missing([1], started, 0, lag=0, per_step=2) == 1
    assert taken([1, 0], started, 0, lag=0, per_step=2) == [1, 0]


def test_more_than_a_batch_that_has_to_be_taken_is_a_mistake_of_the_steps_before() -> None:
    started = {3: 0, 4: 0, 5: 0, 6: 1}
    with pytest.raises(AssertionError, match="3 groups of version 0 or before have to be taken in step 2"):
        taken([3, 4], started, 2, lag=2, per_step=2)
    assert taken([3, 4, 5], started, 2, lag=2, per_step=3) == [3, 4, 5]
