"""Waiting for other processes: every wait has a deadline, and its end says who failed on which host, doing what.

The first failure that is seen is seldom the cause: when one rank of a learner dies, the others fail in the collective
that they share with it. So an error that may be such a consequence is held back until the cause had time to show.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from slipstream.refit.config import Channel, ChannelBrokeError
from slipstream.workers.session import actor_environment, counted, machine, on_node, own_node

UNKNOWN_HOST = "a host not known yet"
_CAUSE_S = 60.0  # Ray declares a host dead after at most 50 s of silence
_STEERED_CAUSE_S = 10.0  # the same of a broken channel, before whoever waits for its steering process loses patience
_PROBE_S = 15.0  # for a host to say how a process of it does
_RUNNING = frozenset({"running", "sleeping", "disk-sleep", "idle"})


class LostWorkerError(RuntimeError):
    """A process of the run died, or does not answer: what it held is lost, and what shared a collective with it stuck.

    A worker that steers others raises it as well, and it stays this error on its way to the driver.

    Attributes:
        workers: those that are lost.
    """

    def __init__(self, message: str, workers: Sequence[Worker]) -> None:
        super().__init__(message)
        self.workers = tuple(workers)

    def __reduce__(self) -> tuple[type[LostWorkerError], tuple[str, list[Worker]]]:
        """Send who they are, for nobody can call them any more."""
        return LostWorkerError, (str(self), [replace(worker, actor=None) for worker in self.workers])


@dataclass(frozen=True, slots=True)
class Worker:
    """An actor, and how people call it: `engine 0`, `learner rank 3`."""

    actor: Any = field(compare=False)
    name: str
    host: str = UNKNOWN_HOST  # address of its node
    node_id: str = ""
    pid: int = 0
    machine: str = ""  # what it runs on, in words

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time that an answer may take, and the field that says so."""

    seconds: float
    field: str


_ALIVE = Deadline(10.0, "fixed")  # an idle process has nothing else to do


E = TypeVar("E", bound=Any)  # engines or a learner
StatesOf = Callable[[Sequence[Worker]], Mapping[Worker, str]]


class Crew:
    """Workers that are asked together, and what they did last."""

    def __init__(self, workers: Sequence[Worker], deadline: Deadline) -> None:
        self.workers = tuple(workers)
        self.last_done = "nothing yet"
        self._deadline = deadline

    def ask(self, what: str, call: Callable[[Any], Any], *, deadline: Deadline | None = None) -> list[Any]:
        """Call all of them at once; the answers in their order. See `answers` for errors.

        Args:
            deadline: of this call alone.
        """
        return self.start(what, call, deadline=deadline)()

    def start(
        self, what: str, call: Callable[[Any], Any], *, deadline: Deadline | None = None
    ) -> Callable[[], list[Any]]:
        """Call all of them at once; what it returns waits for the answers, as `ask` does, from then on by the clock."""
        calls = [(worker, call(worker.actor)) for worker in self.workers]
        return lambda: self.gather(what, calls, deadline=deadline)

    def first_of(self, what: str, calls: Sequence[tuple[Worker, Any]]) -> Any:
        """Give the call that is answered first, of those that were made to some of them.

        Raises:
            LostWorkerError: none is before the deadline.
        """
        done, _ = ray.wait([ref for _, ref in calls], num_returns=1, timeout=self._deadline.seconds)
        if done:
            return done[0]
        raise _silent([worker for worker, _ in calls], what, self.last_done, self._deadline, process_states)

    def gather(self, what: str, calls: Sequence[tuple[Worker, Any]], *, deadline: Deadline | None = None) -> list[Any]:
        """The answers to calls that were made to some of them."""
        found = answers(calls, what=what, deadline=deadline or self._deadline, last_done=self.last_done)
        self.last_done = what
        return found


def answers(
    calls: Sequence[tuple[Worker, Any]],
    *,
    what: str,
    deadline: Deadline,
    last_done: str = "nothing yet",
    cause_s: float = _CAUSE_S,
    backend: Any = ray,
    states_of: StatesOf | None = None,
) -> list[Any]:
    """Wait for the answers to `calls`, which belong together: workers and what Ray gave for calling them.

    Args:
        what: what they are doing, for the error.
        last_done: what they did before that.
        backend: Ray, of which `wait` and `get` are used.
        cause_s: how long a RuntimeError of one of several is held back: another's death may be its cause.
        states_of: what the processes of workers that do not answer are doing.
    Raises:
        LostWorkerError: one died, or did not answer before the deadline; or one that steers others says so of them.
        Exception: what a worker raised, with a note of who it was; one that only saw a channel break comes last.
    """
    waiting = {ref: worker for worker, ref in calls}
    found: dict[Any, Any] = {}
    failed: list[Exception] = []
    end_s = time.monotonic() + deadline.seconds
    while waiting:
        done, _ = backend.wait(list(waiting), num_returns=1, timeout=max(0.0, end_s - time.monotonic()))
        if not done:
            break
        worker = waiting.pop(done[0])
        try:
            found[done[0]] = backend.get(done[0])
        except RayTaskError as error:
            error.add_note(f"{worker} failed during {what} (done before: {last_done})")
            if isinstance(error, LostWorkerError):
                raise error.cause from error  # as the worker raised it that steers the lost one
            if not isinstance(error, RuntimeError):
                raise
            failed.append(error)
            end_s = min(end_s, time.monotonic() + cause_s)
        except RayError as error:
            raise _died(worker, error, what, last_done) from (failed[0] if failed else error)
    own = [error for error in failed if not isinstance(error, ChannelBrokeError)]
    if waiting and not own:
        raise _silent(list(waiting.values()), what, last_done, deadline, states_of or process_states)
    for error in own or failed:
        raise error
    return [found[ref] for _, ref in calls]


def started(workers: Sequence[Worker], deadline: Deadline) -> list[Worker]:
    """Wait until the workers have started; the same with their hosts and process ids. If one does not, all end.

    An actor that is still starting would put its start on the clock of whoever calls it first.
    """
    try:
        places = Crew(workers, deadline).ask("its start", lambda actor: actor.__ray_call__.remote(_place))
    except BaseException:
        for worker in workers:
            ray.kill(worker.actor)
        raise
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [
        replace(worker, host=addresses[node_id], node_id=node_id, pid=pid, machine=machine_)
        for worker, (node_id, pid, machine_) in zip(workers, places, strict=True)
    ]


class RayEngineControl:
    """All engines of a run at once, as a sender steers them: an `EngineControl` of `slipstream.refit.stream`.

    The driver makes it, and the learner's rank 0, to which it travels, uses it.
    """

    def __init__(self, engines: Sequence[Worker], *, channel: Channel, num_workers_each: int, timeout_s: float) -> None:
        self._engines = list(engines)
        self._channel = channel
        self._num_workers_each = num_workers_each
        self._deadline = Deadline(timeout_s, "refit.timeout_s")
        self._is_draft = False
        self._last_done = "nothing yet"

    @property
    def num_workers(self) -> int:
        """Processes that receive, of all engines."""
        return len(self._engines) * self._num_workers_each

    def aim(self, *, is_draft: bool) -> None:
        """Choose the model that the next updates are for."""
        self._is_draft = is_draft

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have all engines join; the workers of each come after those of the one before."""

        def join(index: int, actor: Any) -> Any:
            settings = settings_of(init_info, index=index, num_workers_each=self._num_workers_each)
            return actor.join_channel.remote(self._channel, settings)

        self._on_all(f"joining the {self._channel.value} channel", join)

    def start_weight_update(self) -> None:
        """Begin an update of the model that was chosen."""
        self._on_all("the start of an update", lambda _, actor: actor.start_update.remote(is_draft=self._is_draft))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Have all engines take a part of the weights."""
        shared = ray.put(update_info)
        self._on_all("a transfer of weights", lambda _, actor: actor.update.remote(self._channel, shared))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update; versions are adopted later."""
        del weight_version
        self._on_all("the end of an update", lambda _, actor: actor.finish_update.remote())

    def _on_all(self, what: str, call: Callable[[int, Any], Any]) -> None:
        calls = [(engine, call(index, engine.actor)) for index, engine in enumerate(self._engines)]
        answers(calls, what=what, deadline=self._deadline, last_done=self._last_done, cause_s=_STEERED_CAUSE_S)
        self._last_done = what


def settings_of(init_info: Mapping[str, Any], *, index: int, num_workers_each: int) -> dict[str, Any]:
    """Settings for engine number `index`: vLLM's senders know one engine, whose workers have the first ranks."""
    settings = dict(init_info)
    if "rank_offset" in settings:
        settings["rank_offset"] += index * num_workers_each
    return settings


class Idle(Generic[E]):
    """Engines or learners that nobody uses, by what they were started with; the longest idle one goes first.

    Starting one takes longer than much of what is then asked of it, so a process that runs several stages one after
    another may keep it warm: the next user gives it other weights. Off by default, for an idle process holds memory.
    Safe in threads.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[str, E]] = []  # longest idle first
        self._lock = threading.Lock()

    def take(self, key: str) -> E | None:
        """An idle one that was started with `key`, None if there is none; dead ones are dropped on the way."""
        while True:
            with self._lock:
                found = [index for index, (kept, _) in enumerate(self._idle) if kept == key]
                if not found:
                    return None
                _, process = self._idle.pop(found[-1])
            if process.is_alive():
                return process
            process.close()

    def put(self, key: str, process: E, *, capacity: int) -> None:
        """Keep `process` for the next user; beyond `capacity` idle ones the longest idle are closed."""
        with self._lock:
            self._idle.append((key, process))
            surplus = [self._idle.pop(0)[1] for _ in range(len(self._idle) - capacity)]
        for longest_idle in surplus:
            longest_idle.close()

    def end(self) -> None:
        """Close all idle ones."""
        with self._lock:
            ended, self._idle = self._idle, []
        for _, process in ended:
            process.close()


def is_alive(workers: Sequence[Worker]) -> bool:
    """Ask whether every worker's process still answers."""
    try:
        Crew(workers, _ALIVE).ask("its time at rest", lambda actor: actor.__ray_ready__.remote())
    except LostWorkerError:
        return False
    return True


def process_states(workers: Sequence[Worker]) -> dict[Worker, str]:
    """State of each worker's process by its host's word; of a silent host, that it does not answer."""
    environment = {"env_vars": actor_environment({})}
    probe = ray.remote(_process_state)
    asked = {
        worker: probe.options(num_cpus=0, runtime_env=environment, scheduling_strategy=on_node(worker.node_id)).remote(
            worker.pid
        )
        for worker in workers
        if worker.node_id
    }
    done, _ = ray.wait(list(asked.values()), num_returns=max(1, len(asked)), timeout=_PROBE_S) if asked else ([], [])
    states = {worker: "its host does not answer" if worker.node_id else "not yet running" for worker in workers}
    for worker, ref in asked.items():
        if ref in done:
            try:
                states[worker] = ray.get(ref)
            except RayError:
                continue
    return states


def machines(workers: Iterable[Worker]) -> str:
    """Machines of these workers in words, each host once."""
    return counted({worker.node_id: worker.machine for worker in workers}.values())


def _place(actor: Any) -> tuple[str, int, str]:
    """Runs in the actor: its node's id, its process id, and its machine."""
    del actor
    return own_node(), os.getpid(), machine()


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


def _silent(
    workers: Sequence[Worker], what: str, last_done: str, deadline: Deadline, states_of: StatesOf
) -> LostWorkerError:
    states = states_of(workers)
    stuck = [worker for worker in workers if states[worker] not in _RUNNING]
    names = ", ".join(f"{worker} ({states[worker]})" for worker in stuck or workers)
    waiting = [str(worker) for worker in workers if worker not in stuck] if stuck else []
    others = f"; {', '.join(waiting)} waited as well" if waiting else ""
    return LostWorkerError(
        f"{names} did not answer within {deadline.seconds:g} s ({deadline.field}) during {what} (done before: "
        f"{last_done}){others}",
        stuck or workers,
    )
