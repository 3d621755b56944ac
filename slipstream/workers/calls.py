"""Calls to Ray actors under a deadline; an error names the worker that failed, its host and the call.

The first error is seldom the cause. When one rank of a learner dies, the other ranks fail in the collective that they
share with the dead rank. A RuntimeError is therefore held back until the death of another worker had time to show.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from slipstream.refit.config import Channel, ChannelBrokeError
from slipstream.workers.session import actor_environment, counted, machine, node_address, on_node, own_node

UNKNOWN_HOST = "a host not known yet"
_CAUSE_S = 60.0  # Ray declares a host dead after at most 50 s of silence
_STEERED_CAUSE_S = 10.0  # the same for calls by the learner's rank 0: shorter than the driver's deadline for the rank
_PROBE_S = 15.0  # time for a host to report the state of a process
_RUNNING = frozenset({"running", "sleeping", "disk-sleep", "idle"})


class LostWorkerError(RuntimeError):
    """Error for a worker that died or does not answer: its memory is lost, and its collectives hang.

    The learner's rank 0, which calls engines itself, raises this error too; the driver gets the same error.
    """

    def __init__(self, message: str, workers: Sequence[Worker]) -> None:
        super().__init__(message)
        self.workers = tuple(workers)

    def __reduce__(self) -> tuple[type[LostWorkerError], tuple[str, list[Worker]]]:
        """Pickle the workers without their actors, which a lost worker no longer has."""
        return LostWorkerError, (str(self), [replace(worker, actor=None) for worker in self.workers])


@dataclass(frozen=True, slots=True)
class Worker:
    """A Ray actor with its name (`engine 0`, `learner rank 3`) and its place."""

    actor: Any = field(compare=False)
    name: str
    host: str = UNKNOWN_HOST  # address of the node
    node_id: str = ""
    pid: int = 0
    machine: str = ""  # processor, system and GPUs of the node in words

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time that an answer may take, and the recipe field that sets the time."""

    seconds: float
    field: str


_ALIVE = Deadline(10.0, "fixed")  # an idle process answers at once


class Crew:
    """Workers that are called together, with the name of the last call that all of them completed."""

    def __init__(self, workers: Sequence[Worker], deadline: Deadline, *, cause_s: float = _CAUSE_S) -> None:
        """Take workers that have begun to start; for `cause_s` a RuntimeError waits for the death that caused it."""
        self.workers = tuple(workers)
        self.last_done = "nothing yet"
        self.deadline = deadline
        self._cause_s = cause_s

    def ask(self, what: str, call: Callable[[Any], Any], *, deadline: Deadline | None = None) -> list[Any]:
        """Call all workers at once and return the answers in the order of the workers; raises as `gather` does.

        A `deadline` of this call takes the place of the crew's.
        """
        return self.start(what, call, deadline=deadline)()

    def start(
        self, what: str, call: Callable[[Any], Any], *, deadline: Deadline | None = None
    ) -> Callable[[], list[Any]]:
        """Call all workers at once and return a function that waits as `ask` does; the deadline runs from that wait."""
        calls = [(worker, call(worker.actor)) for worker in self.workers]
        return lambda: self.gather(what, calls, deadline=deadline)

    def first_of(self, what: str, calls: Sequence[tuple[Worker, Any]]) -> tuple[tuple[Worker, Any], Any]:
        """Wait for the first answer to `calls`; returns the call and the answer, and raises as `gather` does."""
        done, _ = ray.wait([ref for _, ref in calls], num_returns=1, timeout=self.deadline.seconds)
        if not done:
            raise _silent([worker for worker, _ in calls], what, self.last_done, self.deadline)
        first = next(call for call in calls if call[1] == done[0])
        return first, self.gather(what, [first])[0]

    def gather(self, what: str, calls: Sequence[tuple[Worker, Any]], *, deadline: Deadline | None = None) -> list[Any]:
        """Wait for the answers to one call that some of the workers got.

        Args:
            calls: each worker with Ray's reference to its answer.
        Raises:
            LostWorkerError: a worker died or missed the deadline, or a worker raised this error about others.
            Exception: the error of a worker, with a note that names the worker; a ChannelBrokeError only without
                another.
        """
        deadline = deadline or self.deadline
        waiting = {ref: worker for worker, ref in calls}
        found: dict[Any, Any] = {}
        failed: list[Exception] = []
        end_s = time.monotonic() + deadline.seconds
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.1, end_s - time.monotonic()))
            if not done:
                break
            worker = waiting.pop(done[0])
            try:
                found[done[0]] = ray.get(done[0])
            except RayTaskError as error:
                error.add_note(f"{worker} failed during {what} (done before: {self.last_done})")
                if isinstance(error, LostWorkerError):
                    raise error.cause from error  # raised by the learner's rank 0 about an engine that it called
                if not isinstance(error, RuntimeError):
                    raise
                failed.append(error)
                end_s = min(end_s, time.monotonic() + self._cause_s)
            except RayError as error:
                raise _died(worker, error, what, self.last_done) from (failed[0] if failed else error)
        own = [error for error in failed if not isinstance(error, ChannelBrokeError)]
        if waiting and not own:
            raise _silent(list(waiting.values()), what, self.last_done, deadline)
        for error in own or failed:
            raise error
        self.last_done = what
        return [found[ref] for _, ref in calls]


class Proxy:
    """Driver's proxy for workers that it calls together: the engines of a run, or the ranks of a learner."""

    def __init__(self, workers: Sequence[Worker], deadline: Deadline) -> None:
        self._crew = Crew(workers, deadline)
        self._limit: tuple[str, int] | None = None  # node whose cores are shared, and threads of a worker there

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The actors, with the nodes that they run on; of a learner, rank 0 first."""
        return self._crew.workers

    def lost_workers(self) -> list[Worker]:
        """Return the workers whose processes do not answer."""
        crew, lost = Crew(self.workers, _ALIVE), list[Worker]()
        for call in [(worker, worker.actor.__ray_ready__.remote()) for worker in self.workers]:
            try:
                crew.gather("its time at rest", [call])
            except LostWorkerError as error:
                lost += error.workers
        return lost

    def limit_threads(self, node_id: str, num_threads: int | None) -> None:
        """Limit the threads of each worker on a node, where it shares the cores with others; None ends the limit.

        Workers elsewhere have no limit but their own.
        """
        self._limit = None if num_threads is None else (node_id, num_threads)
        own = [num_threads if worker.node_id == node_id else None for worker in self.workers]
        calls = [(each, each.actor.limit_threads.remote(num)) for each, num in zip(self.workers, own, strict=True)]
        self._crew.gather("limit_threads", calls)

    def forget_limit(self) -> None:
        """Give no limit of before to a worker that replaces another; those that run keep theirs."""
        self._limit = None

    def close(self) -> None:
        """Kill the workers' processes, as vLLM frees its memory in no other way."""
        for worker in self.workers:
            ray.kill(worker.actor)

    def _of_first(self, what: str, call: Callable[[Any], Any]) -> Any:
        first = self.workers[0]
        return self._crew.gather(what, [(first, call(first.actor))])[0]


E = TypeVar("E", bound=Any)  # engines or a learner


def started(workers: Sequence[Worker], deadline: Deadline) -> list[Worker]:
    """Wait until the workers have started and return them with hosts and process ids; kill all if one fails to start.

    Without this wait the time of the start would count against the deadline of the first call.
    """
    try:
        places = Crew(workers, deadline).ask("its start", lambda actor: actor.__ray_call__.remote(_place))
    except BaseException:
        for worker in workers:
            ray.kill(worker.actor)
        raise
    return [replace(worker, **place) for worker, place in zip(workers, places, strict=True)]


class RayEngineControl:
    """`EngineControl` of `slipstream.refit.channel` over Ray: a sender's calls go to all engines of the run.

    The driver makes the object and sends it to the learner's rank 0, which makes the calls.
    """

    def __init__(self, engines: Sequence[Worker], *, channel: Channel, num_workers_each: int, timeout_s: float) -> None:
        self._crew = Crew(engines, Deadline(timeout_s, "refit.timeout_s"), cause_s=_STEERED_CAUSE_S)
        self._channel = channel
        self._num_workers_each = num_workers_each
        self.num_workers = len(engines) * num_workers_each
        self._is_draft = False

    def aim(self, *, is_draft: bool) -> None:
        """Choose the model, policy or draft, that the next updates replace."""
        self._is_draft = is_draft

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let all engines join the channel; ranks are numbered engine by engine."""
        calls = []
        for index, engine in enumerate(self._crew.workers):
            settings = settings_of(init_info, index=index, num_workers_each=self._num_workers_each)
            calls.append((engine, engine.actor.join_channel.remote(self._channel, settings)))
        self._crew.gather(f"joining the {self._channel.value} channel", calls)

    def start_weight_update(self) -> None:
        """Begin an update of the chosen model."""
        self._crew.ask("the start of an update", lambda actor: actor.start_update.remote(is_draft=self._is_draft))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let all engines load a part of the weights."""
        shared = ray.put(update_info)
        self._crew.ask("a transfer of weights", lambda actor: actor.update.remote(self._channel, shared))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update; the engines adopt the versions in a later call."""
        del weight_version
        self._crew.ask("the end of an update", lambda actor: actor.finish_update.remote())


def settings_of(init_info: Mapping[str, Any], *, index: int, num_workers_each: int) -> dict[str, Any]:
    """Shift the rank offset in `init_info` to engine number `index`; vLLM's senders know a single engine."""
    settings = dict(init_info)
    if "rank_offset" in settings:
        settings["rank_offset"] += index * num_workers_each
    return settings


class Idle(Generic[E]):
    """Thread-safe pool of idle engines or learners, keyed by their start settings; the longest idle is closed first.

    A start takes longer than many stages compute, so a driver of several stages may keep processes alive for the next
    one, which loads other weights. The pool is off by default, as idle processes hold memory.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[str, E]] = []  # longest idle first
        self._lock = threading.Lock()

    def take(self, key: str) -> E | None:
        """Remove and return the entry for `key`, or None; dead entries for `key` are closed."""
        while True:
            with self._lock:
                found = [index for index, (kept, _) in enumerate(self._idle) if kept == key]
                if not found:
                    return None
                _, process = self._idle.pop(found[-1])
            if not process.lost_workers():
                return process
            process.close()

    def put(self, key: str, process: E, *, capacity: int) -> None:
        """Add `process` to the pool and close the longest idle entries beyond `capacity`."""
        with self._lock:
            self._idle.append((key, process))
            surplus = [self._idle.pop(0)[1] for _ in range(len(self._idle) - capacity)]
        for longest_idle in surplus:
            longest_idle.close()

    @contextmanager
    def lent(self, key: str, start: Callable[[], E], *, capacity: int) -> Iterator[tuple[E, bool]]:
        """Yield an entry for `key`, or a new process, and True for an entry; the end of the block returns it.

        After an exception the process is closed, because its state is unknown.
        """
        kept = self.take(key)
        process = start() if kept is None else kept
        try:
            yield process, kept is not None
        except BaseException:
            process.close()
            raise
        self.put(key, process, capacity=capacity)

    def end(self) -> None:
        """Close all entries."""
        with self._lock:
            ended, self._idle = self._idle, []
        for _, process in ended:
            process.close()


def process_states(workers: Sequence[Worker]) -> dict[Worker, str]:
    """Ask each worker's host for the state of the worker's process; a silent host is reported as such."""
    probe: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": actor_environment({})})(_process_state)
    asked = {
        worker: probe.options(scheduling_strategy=on_node(worker.node_id)).remote(worker.pid)
        for worker in workers
        if worker.node_id
    }
    states = {worker: "its host does not answer" if worker.node_id else "not yet running" for worker in workers}
    end_s = time.monotonic() + _PROBE_S
    for worker, ref in asked.items():
        with suppress(RayError):
            states[worker] = ray.get(ref, timeout=max(0.1, end_s - time.monotonic()))
    return states


def machines(workers: Iterable[Worker]) -> str:
    """Describe the machines of these workers, each host once."""
    return counted({worker.node_id: worker.machine for worker in workers}.values())


def _place(actor: Any) -> dict[str, Any]:
    """Return the fields of the actor's `Worker` that are its place; runs in the actor."""
    del actor
    return {"host": node_address(), "node_id": own_node(), "pid": os.getpid(), "machine": machine()}


def _process_state(pid: int) -> str:
    import psutil

    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "dead"


def _died(worker: Worker, error: RayError, what: str, last_done: str) -> Exception:
    if isinstance(error, ActorDiedError) and error.actor_init_failed:
        error.add_note(f"{worker} failed during its start")
        return error
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    reason = next((line for line in lines[1:] if "died" in line or "dead" in line or "exit" in line), lines[0])
    return LostWorkerError(
        f"{worker} died during {what} (done before: {last_done}): {reason.removeprefix('The actor is dead because ')}",
        [worker],
    )


def _silent(workers: Sequence[Worker], what: str, last_done: str, deadline: Deadline) -> LostWorkerError:
    states = process_states(workers)
    lost = [worker for worker in workers if states[worker] not in _RUNNING] or workers
    names = ", ".join(f"{worker} ({states[worker]})" for worker in lost)
    waiting = ", ".join(str(worker) for worker in workers if worker not in lost)
    others = f"; {waiting} waited as well" if waiting else ""
    return LostWorkerError(
        f"{names} did not answer within {deadline.seconds:g} s ({deadline.field}) during {what} (done before: "
        f"{last_done}){others}",
        lost,
    )
