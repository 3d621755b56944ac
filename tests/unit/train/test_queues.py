"""Loops that wait for one another, and end together."""

from __future__ import annotations

import threading
import time

import pytest

from slipstream.train.queues import Ended, Queue, ThreadGroup


def forever(threads: ThreadGroup) -> None:
    threads.wait_for(lambda: None)


def test_when_the_finite_loop_is_done_the_others_end_where_they_wait_and_what_they_would_have_taken_is_left() -> None:
    threads, ended, shared = ThreadGroup(), [], ["late"]

    def produce() -> None:
        try:
            forever(threads)
        except Ended:
            ended.append("produce")
            raise

    threads.run({"produce": produce, "train": lambda: None}, finite="train")
    assert ended == ["produce"]
    for late in (threads.update, threads.wait_for):
        with pytest.raises(Ended):
            late(lambda: shared.pop())
    assert shared == ["late"]


def test_a_loop_that_ends_too_early_is_an_error() -> None:
    threads = ThreadGroup()
    with pytest.raises(RuntimeError, match=r"^the loop 'produce' ended before the training did$"):
        threads.run({"produce": lambda: None, "train": lambda: forever(threads)}, finite="train")


def test_the_first_failure_is_the_one_that_is_raised() -> None:
    threads = ThreadGroup()

    def fails() -> None:
        raise ValueError("first")

    def fails_after_it() -> None:
        try:
            forever(threads)
        finally:
            raise KeyError("second")

    with pytest.raises(ValueError, match="first"):
        threads.run({"train": fails_after_it, "produce": fails}, finite="train")


def test_loops_run_in_threads_of_their_names_which_a_process_does_not_wait_for() -> None:
    threads, found = ThreadGroup(), list[threading.Thread]()
    threads.run({"train": lambda: found.append(threading.current_thread())}, finite="train")
    assert [(thread.name, thread.daemon) for thread in found] == [("train", True)]


def test_a_loop_inside_a_call_is_waited_for_a_moment_and_until_its_end_by_settling() -> None:
    threads, released, done = ThreadGroup(), threading.Event(), []
    threads.join()  # before anybody ran there is nobody to wait for

    def produce() -> None:
        released.wait(30.0)
        done.append(True)

    start_s = time.monotonic()
    threads.run({"produce": produce, "train": lambda: None}, finite="train")
    assert 0.4 < time.monotonic() - start_s < 10.0
    assert not done
    released.set()
    threads.join()
    assert done == [True]


def test_a_taker_is_woken_by_what_is_put() -> None:
    threads, got = ThreadGroup(), []
    handed: Queue[str] = Queue(threads)

    def produce() -> None:
        time.sleep(0.05)  # the other one waits by then
        handed.put("weights")
        forever(threads)

    threads.run({"train": lambda: got.append(handed.take()), "produce": produce}, finite="train")
    assert got == ["weights"]


def test_whoever_takes_something_wakes_the_others() -> None:
    threads, shared, got = ThreadGroup(), ["a"], []

    def produce() -> None:
        seen = threads.wait_for(lambda: "empty" if not shared else None)
        threads.update(lambda: got.append(seen))
        forever(threads)

    def train() -> None:
        time.sleep(0.05)  # the other one waits by then
        got.append(threads.wait_for(lambda: shared.pop() if shared else None))
        threads.wait_for(lambda: len(got) == 2 or None)

    threads.run({"produce": produce, "train": train}, finite="train")
    assert sorted(got) == ["a", "empty"]


def test_a_change_gives_what_it_makes_and_something_that_counts_as_false_is_something() -> None:
    assert ThreadGroup().update(lambda: 7) == 7
    assert ThreadGroup().wait_for(lambda: 0) == 0


def test_what_is_handed_over_comes_in_its_order_by_one_by_look_all_at_once_or_as_it_is_picked() -> None:
    handed = Queue(ThreadGroup(), [0])
    for item in (1, 2, 3):
        handed.put(item)
    assert (handed.take(), handed.poll(), handed.drain(), handed.drain(), handed.poll()) == (0, 1, [2, 3], [], None)
    assert handed.wait_for(0) == ()
    for item in (5, 3, 9, 1):
        handed.put(item)
    assert handed.wait_for(1) == handed.items == (5, 3, 9, 1)
    assert handed.pick(lambda waiting: [waiting[2], waiting[0]]) == [9, 5]
    assert handed.items == (3, 1)
