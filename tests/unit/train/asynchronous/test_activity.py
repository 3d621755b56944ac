"""Spans of work on a clock that the test moves."""

from __future__ import annotations

import time

import pytest

from slipstream.train.asynchronous.activity import Activity, common_s, total_s


class Clock:
    """At `now`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_work_is_cut_at_the_ends_of_a_step_and_counted_in_both() -> None:
    clock = Clock()
    activity = Activity(clock)
    clock.now = 1.0
    with activity.busy():
        clock.now = 3.0
        assert activity.between(0.0, 2.0) == [(1.0, 2.0)]  # what goes on is included
        activity.forget(2.0)
        clock.now = 5.0
    with activity.busy():
        clock.now = 6.0
    assert activity.between(2.0, 10.0) == [(2.0, 5.0), (5.0, 6.0)]
    activity.forget(5.5)
    assert activity.between(0.0, 10.0) == [(5.0, 6.0)]


def test_a_rest_is_taken_once() -> None:
    activity = Activity()
    activity.rested(0.5)
    activity.rested(0.25)
    assert (activity.take_rest(), activity.take_rest()) == (0.75, 0.0)


def test_what_two_did_at_the_same_time_is_counted_once() -> None:
    ours, theirs = [(0.0, 2.0), (3.0, 6.0)], [(1.0, 4.0), (5.0, 9.0)]
    assert (total_s(ours), total_s(theirs)) == (5.0, 7.0)
    assert common_s(ours, theirs) == 3.0  # 1-2, 3-4 and 5-6
    assert common_s(ours, []) == 0.0


def test_work_that_fails_ends_and_counts() -> None:
    clock = Clock()
    activity = Activity(clock)
    with pytest.raises(ZeroDivisionError), activity.busy():
        clock.now = 2.0
        raise ZeroDivisionError
    clock.now = 3.0
    assert activity.between(0.0, 10.0) == [(0.0, 2.0)]


def test_work_that_ended_is_forgotten_at_its_end_and_nothing_is_seen_of_it_from_there_on() -> None:
    clock = Clock()
    activity = Activity(clock)
    with activity.busy():
        clock.now = 2.0
    assert activity.between(2.0, 3.0) == activity.between(-1.0, 0.0) == []
    activity.forget(1.5)
    assert activity.between(0.0, 3.0) == [(0.0, 2.0)]
    activity.forget(2.0)
    assert activity.between(0.0, 3.0) == []


def test_a_clock_that_is_not_given_is_that_of_the_process() -> None:
    activity = Activity()
    start_s = time.perf_counter()
    with activity.busy():
        pass
    (span,) = activity.between(start_s, time.perf_counter())
    assert start_s <= span[0] < span[1]
