"""Pool of worker processes that run sympy; a worker that misses a request's deadline is killed."""

from __future__ import annotations

import json
import logging
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("worker.py")
_START_TIMEOUT_S = 120.0  # for imports on a busy machine
_ORPHAN_GRACE_S = 5.0  # after its deadline a worker ends itself, in case its parent is gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Compare `answer` with `gold`; None asks if `gold` can be read."""

    gold: str
    answer: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Verdicts in the order of the requests; a timeout or a crash is False."""

    verdicts: tuple[bool, ...]
    num_timeouts: int
    num_crashes: int


class WorkerPool:
    """Up to `num_workers` processes, started on demand and restarted after a kill. Not thread-safe."""

    def __init__(self, *, num_workers: int, timeout_s: float, memory_gib: float) -> None:
        """Set the limits; `timeout_s` applies to each request, without the start of its worker."""
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._memory_bytes = int(memory_gib * 2**30)
        self._workers: list[_Worker] = []

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Run all `requests` and return their verdicts.

        Raises:
            RuntimeError: a worker could not start.
        """
        queue = deque(enumerate(requests))
        verdicts = [False] * len(requests)
        num_timeouts = num_crashes = 0
        try:
            while queue or any(worker.job is not None for worker in self._workers):
                self._feed(queue)
                for worker in self._wait():
                    job, reply = worker.take_reply()
                    if not reply:
                        self._drop(worker, job, "ended by itself")
                    if job is not None:
                        verdicts[job[0]] = reply == b"1"
                        num_crashes += not reply
                for worker in [worker for worker in self._workers if worker.is_late()]:
                    self._drop(worker, worker.job, f"ran into the deadline of {self._timeout_s} s")
                    num_timeouts += 1
        except BaseException:
            self.close()  # a late reply must not answer the next call's request
            raise
        return Outcome(verdicts=tuple(verdicts), num_timeouts=num_timeouts, num_crashes=num_crashes)

    def _feed(self, queue: deque[tuple[int, Request]]) -> None:
        """Send a request to each idle worker, and start workers for the requests that remain."""
        for worker in self._workers:
            if queue and worker.is_idle():
                worker.send(queue.popleft(), timeout_s=self._timeout_s)
        num_starting = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self._num_workers and num_starting < len(queue):
            self._workers.append(_Worker(memory_bytes=self._memory_bytes, alarm_s=self._timeout_s + _ORPHAN_GRACE_S))
            num_starting += 1

    def _wait(self) -> list[_Worker]:
        """Wait for workers that replied or ended; empty when the next deadline comes first."""
        waiting = [worker for worker in self._workers if not worker.is_idle()]
        with selectors.DefaultSelector() as selector:
            for worker in waiting:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            remaining_s = min(worker.deadline_s for worker in waiting) - time.monotonic()
            return [key.data for key, _ in selector.select(timeout=max(0.0, remaining_s))]

    def _drop(self, worker: _Worker, job: tuple[int, Request] | None, why: str) -> None:
        """Kill a worker, which the next `_feed` replaces, and raise if it never became ready."""
        worker.kill()
        self._workers.remove(worker)
        if not worker.ready:
            raise RuntimeError(f"a reward worker {why} before it was ready: does `import latex2sympy2_extended` work?")
        logger.warning("a reward worker %s: %s", why, job and job[1])


class _Worker:
    """One process and its current job, the index and the request."""

    def __init__(self, *, memory_bytes: int, alarm_s: float) -> None:
        command = [sys.executable, str(_SCRIPT), str(memory_bytes), str(alarm_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.job: tuple[int, Request] | None = None
        self.deadline_s = time.monotonic() + _START_TIMEOUT_S
        self.ready = False

    @property
    def replies(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def is_idle(self) -> bool:
        return self.ready and self.job is None

    def is_late(self) -> bool:
        return not self.is_idle() and time.monotonic() >= self.deadline_s

    def send(self, job: tuple[int, Request], *, timeout_s: float) -> None:
        """Start `job`. The death of an idle worker shows when its reply is read."""
        assert self._process.stdin is not None
        self.job, self.deadline_s = job, time.monotonic() + timeout_s
        line = json.dumps({"gold": job[1].gold, "answer": job[1].answer}) + "\n"
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            logger.debug("a reward worker died while idle")

    def take_reply(self) -> tuple[tuple[int, Request] | None, bytes]:
        """Return the finished job (None for the ready signal) and the reply, empty if the process has ended."""
        job, reply = self.job, self.replies.read(1)
        if reply:
            self.ready, self.job = True, None
        return job, reply

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
