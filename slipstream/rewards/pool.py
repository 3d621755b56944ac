"""Worker processes that compute rewards, each with a deadline for each request and killed when it passes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.rewards.config import MATHEMATICS, RewardConfig

logger = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("worker.py")
_START_TIMEOUT_S = 120.0  # imports on a busy machine
_ORPHAN_GRACE_S = 5.0  # a worker ends itself so long after its deadline: only when the parent is gone
_REQUEST_BYTES = 2**20  # the largest buffer that Linux gives a pipe: writing less to an idle worker never blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One call of a worker's function."""

    name: str  # in the log
    arguments: Mapping[str, Any]  # that JSON can hold


Job = tuple[int, str, bytes]
"""Index of a request, its name, and the line that a worker reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Results of the function in the order of the requests; None where it returned nothing, for a reason."""

    values: tuple[Any, ...]
    failures: Mapping[int, str]  # the reason, by the request's index; time-outs and crashes are among them
    num_timeouts: int
    num_crashes: int


def _jobs(requests: Sequence[Request]) -> tuple[deque[Job], dict[int, str]]:
    """Encode the requests; those that are longer than a worker's pipe have failed."""
    jobs: deque[Job] = deque()
    failures: dict[int, str] = {}
    for index, request in enumerate(requests):
        line = json.dumps(dict(request.arguments)).encode() + b"\n"
        if len(line) <= _REQUEST_BYTES:
            jobs.append((index, request.name, line))
        else:
            failures[index] = f"a call must fit into {_REQUEST_BYTES} bytes, got a response that makes {len(line)}"
    return jobs, failures


class WorkerPool:
    """Up to `num_workers` processes, started on demand and restarted after a kill. Not thread-safe."""

    def __init__(self, function: str, config: RewardConfig) -> None:
        """Keep the settings; nothing starts yet. `function` is `FILE:NAME`, or one of `BUILT_IN`."""
        self._function = function
        self._config = config
        self._workers: list[_Worker] = []

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def start(self) -> None:
        """Start one worker and wait until its function is loaded; a `RuntimeError` where it cannot be."""
        self._workers.append(_Worker(self._function, self._config))
        self.run(())

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Call the function with each of `requests`; all workers are idle when this returns.

        A worker that cannot start or load its function is a `RuntimeError`.
        """
        queue, failures = _jobs(requests)
        values: list[Any] = [None] * len(requests)
        num_timeouts = num_crashes = 0
        try:
            while queue or not all(worker.is_idle() for worker in self._workers):
                self._feed(queue)
                for worker in self._wait():
                    job, reply = worker.take_reply()
                    if not reply:
                        self._drop(worker, "ended by itself")
                    if job is None:
                        continue
                    values[job[0]] = reply.get("value")
                    if "error" in reply or not reply:
                        failures[job[0]] = reply.get("error", "the worker ended by itself")
                    num_crashes += not reply
                for worker in [worker for worker in self._workers if worker.is_late()]:
                    why = f"ran into the deadline of {self._config.timeout_s if worker.ready else _START_TIMEOUT_S} s"
                    self._drop(worker, why)
                    assert worker.job is not None  # it was ready
                    failures[worker.job[0]] = f"the worker {why}"
                    num_timeouts += 1
        except BaseException:
            self.close()  # a late reply must not answer the next call's request
            raise
        return Outcome(values=tuple(values), failures=failures, num_timeouts=num_timeouts, num_crashes=num_crashes)

    def _feed(self, queue: deque[Job]) -> None:
        """Send a request to each idle worker, and start workers for the requests that remain."""
        for worker in self._workers:
            if queue and worker.is_idle():
                worker.send(queue.popleft(), timeout_s=self._config.timeout_s)
        num_starting = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self._config.num_workers and num_starting < len(queue):
            self._workers.append(_Worker(self._function, self._config))
            num_starting += 1

    def _wait(self) -> list[_Worker]:
        """Wait for workers that replied or ended; empty when the next deadline comes first."""
        waiting = [worker for worker in self._workers if not worker.is_idle()]
        with selectors.DefaultSelector() as selector:
            for worker in waiting:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            remaining_s = min(worker.deadline_s for worker in waiting) - time.monotonic()
            return [key.data for key, _ in selector.select(timeout=max(0.0, remaining_s))]

    def _drop(self, worker: _Worker, why: str) -> None:
        """Kill a worker, which the next `_feed` replaces, and raise if it never became ready."""
        worker.kill()
        self._workers.remove(worker)
        if not worker.ready:
            is_own = self._function != MATHEMATICS
            imports = f"{self._function} start" if is_own else "`import latex2sympy2_extended` work"
            raise RuntimeError(f"a reward worker {why} before it was ready: does {imports}?")
        logger.warning("a reward worker %s: %s", why, worker.job and worker.job[1])


class _Worker:
    """One process and its current job."""

    def __init__(self, function: str, config: RewardConfig) -> None:
        limits = int(config.worker_memory_gib * 2**30), config.timeout_s + _ORPHAN_GRACE_S
        command = [sys.executable, str(_SCRIPT), function, *map(str, limits)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self.replies = self._process.stdin, self._process.stdout
        fcntl.fcntl(self._requests, fcntl.F_SETPIPE_SZ, _REQUEST_BYTES)
        self.job: Job | None = None
        self.deadline_s = time.monotonic() + _START_TIMEOUT_S
        self.ready = False

    def is_idle(self) -> bool:
        return self.ready and self.job is None

    def is_late(self) -> bool:
        return not self.is_idle() and time.monotonic() >= self.deadline_s

    def send(self, job: Job, *, timeout_s: float) -> None:
        """Start `job`. The death of an idle worker shows when its reply is read."""
        self.job, self.deadline_s = job, time.monotonic() + timeout_s
        try:
            self._requests.write(job[2])
        except BrokenPipeError:
            logger.debug("a reward worker died while idle")

    def take_reply(self) -> tuple[Job | None, dict[str, Any]]:
        """The finished job (None: the worker got ready) and the reply, empty if there is none to trust."""
        job, line = self.job, self.replies.read(_REQUEST_BYTES)
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:  # nothing, for the process has ended, or what a child of the function wrote
            reply = {}
        if reply:
            if not self.ready and "error" in reply:
                raise RuntimeError(reply["error"])
            self.ready, self.job = True, None
        return job, reply

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with whatever the function started
        self._process.wait()
        self._requests.close()
        self.replies.close()
