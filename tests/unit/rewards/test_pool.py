"""The pool of reward workers: their limits, and what it says when one is lost."""

import logging
import resource
import sys
from collections import deque
from pathlib import Path

import psutil
import pytest

from slipstream.rewards import pool as pool_module
from slipstream.rewards.config import MATHEMATICS, RewardConfig
from slipstream.rewards.pool import Outcome, Request, WorkerPool

HALF = Request(name="half", arguments={"gold": "0.5", "answer": "\\frac{1}{2}"})
BOMB = Request(name="bomb", arguments={"gold": "7", "answer": "9^{9^{9^{9}}}"})


def test_a_worker_may_take_the_memory_that_it_was_given_and_no_more() -> None:
    before = set(psutil.Process().children())
    pool = WorkerPool(MATHEMATICS, RewardConfig(timeout_s=30.0, worker_memory_gib=1.5))
    assert pool.run([HALF]) == Outcome(values=(True,), failures={}, num_timeouts=0, num_crashes=0)
    (worker,) = set(psutil.Process().children()) - before
    assert worker.rlimit(resource.RLIMIT_AS) == (1_610_612_736, 1_610_612_736)
    pool.close()
    assert set(psutil.Process().children()) <= before


def test_a_worker_that_cannot_start_is_an_error_that_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_SCRIPT", "no file")
    pool = WorkerPool(MATHEMATICS, RewardConfig())
    with pytest.raises(RuntimeError) as caught:
        pool.run([HALF])
    expected = "a reward worker ended by itself before it was ready: does `import latex2sympy2_extended` work?"
    assert str(caught.value) == expected


def test_a_response_that_is_longer_than_a_pipe_costs_itself_alone() -> None:
    long = Request(name="long", arguments={"gold": "1", "answer": "x" * 2**20})
    pool = WorkerPool(MATHEMATICS, RewardConfig(timeout_s=30.0))
    why = "a call must fit into 1048576 bytes, got a response that makes 1048604"
    assert pool.run([long, HALF]) == Outcome(values=(None, True), failures={0: why}, num_timeouts=0, num_crashes=0)
    pool.close()


def test_a_request_that_cost_its_worker_is_named(caplog: pytest.LogCaptureFixture) -> None:
    pool = WorkerPool(MATHEMATICS, RewardConfig(num_workers=1, timeout_s=1.0))
    pool.run([HALF])  # the start of a worker is not what is measured
    with caplog.at_level(logging.WARNING):
        outcome = pool.run([BOMB])
    late = "ran into the deadline of 1.0 s"
    assert outcome == Outcome(values=(None,), failures={0: f"the worker {late}"}, num_timeouts=1, num_crashes=0)
    assert caplog.messages == [f"a reward worker {late}: bomb"]
    assert pool.run([BOMB, BOMB]).num_timeouts == 2


def test_a_worker_that_died_while_idle_had_no_request_to_name(caplog: pytest.LogCaptureFixture) -> None:
    before = set(psutil.Process().children())
    pool = WorkerPool(MATHEMATICS, RewardConfig(num_workers=2, timeout_s=30.0))
    pool.run([HALF])
    (worker,) = set(psutil.Process().children()) - before
    worker.kill()
    worker.wait()
    with caplog.at_level(logging.WARNING):
        assert pool.run([HALF]).num_crashes == 1
    assert caplog.messages == ["a reward worker ended by itself: half"]
    pool.close()


@pytest.mark.parametrize(("num_requests", "num_workers"), [(1, 1), (2, 2), (5, 3)])
def test_as_many_workers_start_as_requests_wait_up_to_the_limit(num_requests: int, num_workers: int) -> None:
    pool = WorkerPool(MATHEMATICS, RewardConfig(num_workers=3, timeout_s=30.0))
    queue = deque((index, "", b"") for index in range(num_requests))
    try:
        for _ in range(2):  # those that are still starting count: asked again, no other one starts
            pool._feed(queue)
            assert len(pool._workers) == num_workers
            assert len(queue) == num_requests  # nobody is ready to take one
            assert not any(worker.is_late() for worker in pool._workers)
    finally:
        pool.close()


def test_a_closed_pool_starts_again_when_there_is_work() -> None:
    pool = WorkerPool(MATHEMATICS, RewardConfig(num_workers=1, timeout_s=30.0))
    for _ in range(2):
        assert pool.run([HALF]).values == (True,)
        pool.close()
        pool.close()


def test_no_file_beside_the_worker_hides_a_module_that_it_imports_before_it_leaves_its_directory() -> None:
    beside = {path.stem for path in Path(pool_module.__file__).parent.glob("*.py")}
    assert "worker" in beside
    assert not beside & set(sys.stdlib_module_names)
