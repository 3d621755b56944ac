"""Loops that wait for one another, and end together."""

from __future__ import annotations

import threading
import time

import pytest

from slipstream.train.asynchronous.meeting import Handover, Meeting, Over


def forever(meeting: Meeting) -> None:
    meeting.wait(lambda: None)


def test_whoever_waits_gets_what_another_one_brings() -> None:
    meeting, shared, got = Meeting(), [], []

    def produce() -> None:
        for item in (1, 2, 3):
            meeting.change(lambda item=item: shared.append(item))
        forever(meeting)

    def train() -> None:
        got.extend(meeting.wait(lambda: shared.pop(0) if shared else None) for _ in range(3))

    meeting.run({"produce": produce, "train": train}, finite="train")
    assert got == [1, 2, 3]


def test_when_the_finite_loop_is_done_the_others_end_where_they_wait() -> None:
    meeting, ended = Meeting(), []

    def produce() -> None:
        try:
            forever(meeting)
        except Over:
            ended.append("produce")
            raise

    meeting.run({"produce": produce, "train": lambda: None}, finite="train")
    assert ended == ["produce"]
    for late in (lambda: meeting.change(lambda: None), lambda: meeting.wait(lambda: 1)):
        with pytest.raises(Over):
            late()


def test_a_loop_that_ends_too_early_is_an_error() -> None:
    meeting = Meeting()
    with pytest.raises(RuntimeError, match=r"^the loop 'produce' ended before the training did$"):
        meeting.run({"produce": lambda: None, "train": lambda: forever(meeting)}, finite="train")


def test_the_first_failure_is_the_one_that_is_raised() -> None:
    meeting = Meeting()

    def fails() -> None:
        raise ValueError("first")

    def fails_after_it() -> None:
        try:
            forever(meeting)
        finally:
            raise KeyError("second")

    with pytest.raises(ValueError, match="first"):
        meeting.run({"train": fails_after_it, "produce": fails}, finite="train")


def test_loops_run_in_threads_of_their_names_which_a_process_does_not_wait_for() -> None:
    meeting, found = Meeting(), []

    def train() -> None:
        thread = threading.current_thread()
        found.append((thread.name, thread.daemon))

    meeting.run({"train": train}, finite="train")
    assert found == [("train", True)]


def test_a_loop_inside_a_call_is_waited_for_a_moment_and_until_its_end_by_settling() -> None:
    meeting, released, done = Meeting(), threading.Event(), []

    def produce() -> None:
        released.wait(30.0)
        done.append(True)

    start_s = time.monotonic()
    meeting.run({"produce": produce, "train": lambda: None}, finite="train")
    assert 0.4 < time.monotonic() - start_s < 10.0
    assert not done
    released.set()
    meeting.settle()
    assert done == [True]


def test_before_anybody_ran_there_is_nobody_to_wait_for() -> None:
    Meeting().settle()


def test_what_is_handed_over_comes_in_its_order_by_one_by_look_or_all_at_once() -> None:
    handed: Handover[int] = Handover(Meeting())
    assert (handed.poll(), handed.drain()) == (None, [])
    for item in (0, 1, 2, 3):
        handed.put(item)
    assert (handed.take(), handed.poll(), handed.drain(), handed.drain()) == (0, 1, [2, 3], [])


def test_a_taker_is_woken_by_what_is_put() -> None:
    meeting, got = Meeting(), []
    handed: Handover[str] = Handover(meeting)

    def produce() -> None:
        time.sleep(0.05)  # the other one waits by then
        handed.put("weights")
        forever(meeting)

    meeting.run({"train": lambda: got.append(handed.take()), "produce": produce}, finite="train")
    assert got == ["weights"]


def test_an_end_wakes_whoever_waits_and_what_it_would_have_taken_is_left() -> None:
    meeting, shared = Meeting(), ["late"]
    meeting.run({"train": lambda: None}, finite="train")
    with pytest.raises(Over):
        meeting.wait(lambda: shared.pop())
    with pytest.raises(Over):
        meeting.change(lambda: shared.pop())
    assert shared == ["late"]


def test_whoever_takes_something_wakes_the_others() -> None:
    meeting, shared, got = Meeting(), ["a"], []

    def produce() -> None:
        seen = meeting.wait(lambda: "empty" if not shared else None)
        meeting.change(lambda: got.append(seen))
        forever(meeting)

    def train() -> None:
        time.sleep(0.05)  # the other one waits by then
        got.append(meeting.wait(lambda: shared.pop() if shared else None))
        meeting.wait(lambda: len(got) == 2 or None)

    meeting.run({"produce": produce, "train": train}, finite="train")
    assert sorted(got) == ["a", "empty"]


def test_a_change_gives_what_it_makes() -> None:
    assert Meeting().change(lambda: 7) == 7


def test_something_that_counts_as_false_is_something() -> None:
    assert Meeting().wait(lambda: 0) == 0
    handed: Handover[int] = Handover(Meeting())
    handed.put(0)
    assert handed.take() == 0
