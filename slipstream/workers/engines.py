"""Rollout engines: the process of one, and all of them as a driver sees them, which keeps them warm between stages."""

from __future__ import annotations

import copy
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from slipstream.drafts.methods import SCHEDULE
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.protocol import GenerationResult, Portion, Trace, WeightFiles
from slipstream.engine.requests import GroupRequest, group_requests
from slipstream.engine.vllm_engine import VllmEngine, engine_arguments, process_environment, without_gpu
from slipstream.grpo.loop_config import KvCache
from slipstream.records.steps import ScheduleEntry
from slipstream.refit.channel import Location
from slipstream.refit.config import Channel, EngineState
from slipstream.refit.fingerprint import Turn
from slipstream.types import Prompt
from slipstream.workers.calls import Crew, Deadline, Idle, LostWorkerError, RayEngineControl, Worker, is_alive, started
from slipstream.workers.cores import CoreShare, CoreSlot
from slipstream.workers.placement.config import Layout
from slipstream.workers.reservation import Reservation, Start, require_gpu, reserved
from slipstream.workers.scheduler import Call, Deal, Ledger, SeenLengths, deal, gather, joined, together
from slipstream.workers.session import actor_environment, node_address, require_here

logger = logging.getLogger(__name__)

_SLICE_S = 0.25  # of several engines: none can be told to stop because another has completed a group


class EngineProcess(VllmEngine):
    """A rollout engine in an actor, on whichever host; it may share the host's cores with a learner."""

    def __init__(
        self,
        policy: Path,
        *,
        config: EngineConfig,
        speculative_config: dict[str, Any] | None,
        executor: str | None = None,
        is_in_flight: bool = False,
        can_sleep: bool = False,
        logical_gpus: bool = False,
    ) -> None:
        """Start a `VllmEngine` with these arguments.

        Args:
            logical_gpus: GPUs that Ray gave this process are only counted: it may compute on the CPU.
        Raises:
            ConfigError: this host does not see `policy`, or the draft.
            PlacementError: it would compute on the CPU, and Ray's GPUs are meant to be some.
        """
        if not logical_gpus:
            require_gpu("engine", problem=without_gpu)
        require_here(policy, draft_directory(speculative_config))
        _name_interface()
        super().__init__(
            policy,
            config=config,
            speculative_config=speculative_config,
            executor=executor,
            is_in_flight=is_in_flight,
            can_sleep=can_sleep,
        )
        self._dtype = config.dtype
        self._most_threads = config.num_threads
        self._share: CoreShare | None = None

    def share_cores(self, slot: CoreSlot | None) -> None:
        """Leave some of the host's cores to a learner that works at the same time; None: no longer.

        The ranks of a tensor-parallel engine, which have processes of their own, keep their threads.
        """
        if self._share is not None:
            self._share.leave()
        if slot is None:
            self._share = None
            self.around_work(nullcontext, None)
        else:
            from slipstream.learner.numerics import engine_keeps_bits

            self._share = CoreShare(slot, most=self._most_threads, changes=engine_keeps_bits(self._dtype))
            self.around_work(self._share.at_work, self._share.fit)

    def refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> EngineState:
        """Refit the engine, and count as at work meanwhile.

        Raises:
            ConfigError: this host does not see `policy`, or `draft`.
        """
        require_here(policy, draft)
        with nullcontext() if self._share is None else self._share.at_work():
            return super().refit(policy, policy_version=policy_version, draft=draft, draft_version=draft_version)


def _name_interface() -> None:
    """Tell gloo, which vLLM uses too, of this host's interface: it would ask for the host's name, which may have none.

    The ranks of a tensor-parallel engine inherit it.
    """
    address = node_address()
    if address != "127.0.0.1":
        from slipstream.learner.rendezvous import interface_of

        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address))


def draft_directory(speculative_config: dict[str, Any] | None) -> Path | None:
    """Directory of the draft's own weights; None without a draft, and where it has none."""
    if speculative_config is None or "model" not in speculative_config:
        return None
    return Path(speculative_config["model"])


class RemoteEngine:
    """Rollout engines in processes of their own: what `VllmEngine` does, of all of them at once.

    `slipstream.workers.scheduler` says how they share a call's prompts. Generation in flight leaves no call under way:
    between two of them every engine is idle, so a refit that another process steers comes between two steps of all of
    them.
    """

    def __init__(
        self,
        engines: Sequence[Worker],
        deadline: Deadline,
        *,
        start: Callable[[int], Worker] | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        """Speak to engines that run.

        Args:
            start: makes another engine in the place of a lost one; None leaves it lost.
            max_num_seqs: rollouts that each engine runs at once; None: as many as it is asked for.
        """
        self._crew = Crew(engines, deadline)
        self._deadline = deadline
        self._start = start
        self._policy_version = 0
        self._max_num_seqs = max_num_seqs
        self._lengths = SeenLengths()
        self._slots: tuple[CoreSlot | None, ...] = ()  # in the cores of the host; empty: they share none
        self._kv_cache: KvCache | None = None  # of engines in flight
        self._ledger = Ledger()
        self._held: list[Portion] = []  # of a call in which another engine was lost

    @property
    def engines(self) -> tuple[Worker, ...]:
        """The actors and where they run."""
        return self._crew.workers

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """Sample the groups of all prompts, dealt to the engines by the lengths seen so far."""
        requests = group_requests(prompts, group_size=group_size, seed=seed)
        num_engines = len(self.engines)
        num_slots = self._max_num_seqs if num_engines > 1 else None  # one engine queues what it has no room for itself
        dealt = deal(requests, self._lengths, num_engines=num_engines, num_slots=num_slots)
        result = joined(requests, generate_dealt(self._crew, dealt, sampling, self._of("generate")))
        self._lengths.note(result.groups)
        return result

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Forget, at the end of the block, the response lengths that were seen in it."""
        kept = copy.deepcopy(self._lengths)
        try:
            yield
        finally:
            self._lengths = kept

    def run_in_flight(self, kv_cache: KvCache | None) -> None:
        """Change the mode of all engines, and of those that take the place of lost ones."""
        self._kv_cache = kv_cache
        self._ledger = Ledger()
        self._held = []
        self._crew.ask("a change of mode", lambda engine: engine.run_in_flight.remote(kv_cache))

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig) -> None:
        """Queue groups; what an engine was given that turns out to be lost is known as its own."""
        given = self._ledger.place(requests, [worker.name for worker in self._crew.workers])
        calls = self._of_some(given, lambda each: each.actor.submit.remote(given[each.name], sampling=sampling))
        self._crew.gather("submitting groups", calls)

    def advance(self, *, max_s: float) -> Portion:
        """Run all engines until one completes a group, for about `max_s` seconds, or until nothing is under way."""
        end_s = time.monotonic() + max_s
        portions, self._held = self._held, []
        while self._ledger.requests and not any(portion.groups for portion in portions):
            try:
                portions += self._slice(max(0.0, end_s - time.monotonic()))
            except LostWorkerError:
                self._held = portions + self._held
                raise
            if time.monotonic() >= end_s:
                break
        return together(portions, num_engines=len(self._crew.workers))

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        """Restart the unfinished rollouts of these groups with other seeds; returns how many they were."""
        told = self._ledger.reseed(indices, seeds)
        calls = self._of_some(told, lambda each: each.actor.restart.remote(told[each.name]))
        return sum(self._crew.gather("a restart of rollouts", calls))

    def take_lost(self, names: Collection[str]) -> tuple[GroupRequest, ...]:
        """Take back what engines of these names had under way."""
        return self._ledger.take(names)

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        """Groups that were submitted and did not come back."""
        return self._ledger.requests

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Alias of `engines`, as learner and engines both have it."""
        return self.engines

    def share_cores(self, slots: Sequence[CoreSlot | None]) -> None:
        """Hand each engine its slot in the cores of the host."""
        self._slots = tuple(slots)
        calls = [(each, each.actor.share_cores.remote(slot)) for each, slot in zip(self.engines, slots, strict=True)]
        self._crew.gather("share_cores", calls)

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """Have all engines draft by another schedule."""
        self._crew.ask(self._of("draft_by"), lambda engine: engine.draft_by.remote(schedule))

    def trace(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingConfig,
        group_size: int,
        seed: int,
        refits: Sequence[WeightFiles] = (),
        steps_between: int = 1,
    ) -> list[Trace]:
        """Trace rollouts on the first engine, which answers for all: they hold the same weights."""
        return self._of_first(
            "trace",
            lambda engine: engine.trace.remote(
                prompts,
                sampling=sampling,
                group_size=group_size,
                seed=seed,
                refits=refits,
                steps_between=steps_between,
            ),
        )

    def sleep(self) -> None:
        """Put all engines to sleep; each wakes when it is asked to generate."""
        self._crew.ask(self._of("sleep"), lambda engine: engine.sleep.remote())

    def refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> list[EngineState]:
        """Refit every engine; returns what each holds when all have the new weights."""
        return self.start_refit(policy, policy_version=policy_version, draft=draft, draft_version=draft_version)()

    def start_refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> Callable[[], list[EngineState]]:
        """Begin to refit every engine; what it returns waits."""
        self._policy_version = policy_version
        return self._crew.start(
            self._of("refit"),
            lambda engine: engine.refit.remote(
                policy, policy_version=policy_version, draft=draft, draft_version=draft_version
            ),
        )

    def locations(self) -> list[Location]:
        """Places of all workers, engine by engine."""
        return [place for places in self._locations() for place in places]

    def control(self, channel: Channel, *, timeout_s: float) -> RayEngineControl:
        """Control with which a sender in another process steers all engines."""
        num_workers = len(self._locations()[0])
        return RayEngineControl(self.engines, channel=channel, num_workers_each=num_workers, timeout_s=timeout_s)

    def start_adopt(self, *, policy_version: int, draft_version: int | None) -> Callable[[], list[EngineState]]:
        """Have all engines call what they received by these versions."""
        self._policy_version = policy_version
        return self._crew.start(
            self._of("adopt"),
            lambda engine: engine.adopt.remote(policy_version=policy_version, draft_version=draft_version),
        )

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """Types of the tensors of the first engine: all engines hold the same."""
        return self._of_first("weight_dtypes", lambda engine: engine.weight_dtypes.remote(is_draft=is_draft))

    def start_fingerprints(self, *, is_draft: bool, turn: Turn) -> Callable[[], list[dict[str, int]]]:
        """Have fingerprints computed of the weights that each engine was told to take last."""
        return self._crew.start(
            self._of("weight_fingerprints"),
            lambda engine: engine.weight_fingerprints.remote(is_draft=is_draft, turn=turn),
        )

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Logprobs of each sequence's tokens, by engine."""
        return self._crew.ask(self._of("token_logprobs"), lambda engine: engine.token_logprobs.remote(sequences))

    def states(self) -> list[EngineState]:
        """Versions that each engine holds."""
        return self._crew.ask("state", lambda engine: engine.state.remote())

    def replace(self, lost: Sequence[Worker]) -> None:
        """Start another engine in the place of each of `lost`, with the weights that the first ones started with."""
        assert self._start is not None, "only engines that `start_engine` made can be replaced"
        engines, names = list(self.engines), {engine.name for engine in lost}
        for index, engine in enumerate(engines):
            if engine.name in names:  # its host and process may be another one's already
                ray.kill(engine.actor)
                engines[index] = self._start(index)
                if engines[index].node_id != engine.node_id and self._slots:
                    self._slots = (*self._slots[:index], None, *self._slots[index + 1 :])
        self._crew = Crew(engines, self._deadline)
        if self._kv_cache is not None:
            calls = self._of_some(names, lambda each: each.actor.run_in_flight.remote(self._kv_cache))
            self._crew.gather(self._of("a change of mode"), calls)
        if self._slots:  # a lost engine may have said that it works, which whoever has its slot alone takes back
            slots = {engine.name: slot for engine, slot in zip(engines, self._slots, strict=True)}
            calls = self._of_some(names, lambda each: each.actor.share_cores.remote(slots[each.name]))
            self._crew.gather(self._of("share_cores"), calls)

    def is_alive(self) -> bool:
        """Ask whether every engine's process still answers."""
        return is_alive(self.engines)

    def close(self) -> None:
        """End the engines' processes: vLLM frees its memory in no other way."""
        for engine in self.engines:
            ray.kill(engine.actor)

    def _slice(self, max_s: float) -> list[Portion]:
        """Run every engine that has work, until one of one or all of several have had their time."""
        is_alone = len(self._crew.workers) == 1
        arguments = {"max_s": max_s if is_alone else min(max_s, _SLICE_S), "stops_at_first": is_alone}
        busy = [worker.name for worker in self.engines if self._ledger.of(worker.name)]
        calls = self._of_some(busy, lambda each: each.actor.advance.remote(**arguments))
        portions, lost = self._answers(calls)
        self._ledger.complete(index for portion in portions for index, _ in portion.groups)
        if lost:
            self._held = portions
            raise LostWorkerError("; ".join(map(str, lost)), [worker for error in lost for worker in error.workers])
        return portions

    def _answers(self, calls: Sequence[tuple[Worker, Any]]) -> tuple[list[Portion], list[LostWorkerError]]:
        """Wait for each engine by itself: what one completed is there although another died."""
        portions: list[Portion] = []
        lost: list[LostWorkerError] = []
        for call in calls:
            try:
                portions += self._crew.gather("generation in flight", [call])
            except LostWorkerError as error:
                lost.append(error)
        return portions, lost

    def _locations(self) -> list[list[Location]]:
        return self._crew.ask("locations", lambda engine: engine.locations.remote())

    def _of_some(self, names: Collection[str], call: Callable[[Worker], Any]) -> list[tuple[Worker, Any]]:
        return [(engine, call(engine)) for engine in self.engines if engine.name in names]

    def _of_first(self, what: str, call: Callable[[Any], Any]) -> Any:
        first = self.engines[0]
        return self._crew.gather(self._of(what), [(first, call(first.actor))])[0]

    def _of(self, what: str) -> str:
        return f"{what} with policy version {self._policy_version}"


def generate_dealt(crew: Crew, dealt: Deal, sampling: SamplingConfig, what: str) -> list[list[Portion]]:
    """Have the engines of `crew` generate what was dealt to them; `what` names that in errors."""
    running: dict[Any, Worker] = {}

    def start(index: int, call: Call) -> Any:
        engine = crew.workers[index]
        ref = engine.actor.generate.remote(
            call.requests, sampling=sampling, is_first=call.is_first, room_for=call.room_for
        )
        running[ref] = engine
        return ref

    def wait(refs: Sequence[Any]) -> tuple[Any, Portion]:
        done = crew.first_of(what, [(running[ref], ref) for ref in refs])
        (portion,) = crew.gather(what, [(running.pop(done), done)])
        return done, portion

    return gather(dealt, start=start, wait=wait)


_ANYWHERE = Layout()
idle_engines: Idle[RemoteEngine] = Idle()


@contextmanager
def start_engine(
    policy: Path,
    *,
    config: EngineConfig,
    speculative_config: dict[str, Any] | None = None,
    layout: Layout = _ANYWHERE,
    kv_cache: KvCache | None = None,
) -> Iterator[RemoteEngine]:
    """Start `config.num_engines` engines that hold `policy` for the span of the block, on the GPUs that `layout` says.

    With `kv_cache` they run in flight: rollouts outlive a refit, and it says what becomes of their keys and values.

    With `config.num_kept_idle` > 0 they outlive the block, and a later one that asks for the same settings gets them
    back, refitted to its own policy and draft. After an exception they end: nobody knows what they hold.
    """
    is_in_flight = kv_cache is not None
    key = _engine_key(policy, config, speculative_config, layout, is_in_flight=is_in_flight)
    engine = idle_engines.take(key)
    try:
        if engine is None:
            engine = _new_engine(policy, config, speculative_config, layout, is_in_flight=is_in_flight)
        else:
            engine.run_in_flight(None)
            engine.refit(policy, policy_version=0, draft=draft_directory(speculative_config))
            if speculative_config is not None and SCHEDULE in speculative_config:  # its last user may have changed it
                entries = speculative_config[SCHEDULE]
                engine.draft_by(
                    [ScheduleEntry(batch_from=low, batch_to=high, num_speculative_tokens=k) for low, high, k in entries]
                )
        if is_in_flight:
            engine.run_in_flight(kv_cache)
        yield engine
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    idle_engines.put(key, engine, capacity=config.num_kept_idle)


def _new_engine(
    policy: Path,
    config: EngineConfig,
    speculative_config: dict[str, Any] | None,
    layout: Layout,
    *,
    is_in_flight: bool,
) -> RemoteEngine:
    k = speculative_config["num_speculative_tokens"] if speculative_config else 0
    starting = Deadline(config.start_timeout_s, "engine.start_timeout_s")

    def begin(index: int) -> Worker:
        start = _start(reserved(layout), index, config)
        environment = actor_environment({**process_environment(config), **start.environment})
        # Learner and engine share the cores, in turn.
        options = {"num_cpus": 0, **start.place, "runtime_env": {"env_vars": environment}}
        actor = (
            ray.remote(EngineProcess)
            .options(**options)
            .remote(
                policy,
                config=config,
                speculative_config=speculative_config,
                executor=start.executor,
                is_in_flight=is_in_flight,
                can_sleep=layout.placement.takes_turns,
                logical_gpus=layout.placement.logical_gpus,
            )
        )
        return Worker(actor, f"engine {index}")

    def replacement(index: int) -> Worker:
        return started([begin(index)], starting)[0]

    logger.info("starting an engine with k=%d", k)
    engines = started([begin(index) for index in range(config.num_engines)], starting)
    return RemoteEngine(
        engines,
        Deadline(config.answer_timeout_s, "engine.answer_timeout_s"),
        start=replacement,
        max_num_seqs=config.max_num_seqs,
    )


def _start(reservation: Reservation | None, index: int, config: EngineConfig) -> Start:
    """Start of an engine on its GPUs, or without any wherever Ray puts it."""
    if reservation is not None:
        return reservation.engine_start(index)
    return Start(place={"num_gpus": 0}, environment={}, executor="uni" if config.tensor_parallel_size == 1 else "mp")


def _engine_key(
    policy: Path,
    config: EngineConfig,
    speculative_config: dict[str, Any] | None,
    layout: Layout,
    *,
    is_in_flight: bool,
) -> str:
    """Key of what no refit can change: the engine's settings and place, the architectures of policy and draft."""
    draft = draft_directory(speculative_config)
    models = [policy] if draft is None else [policy, draft]
    architectures = [(model / "config.json").read_text() for model in models]
    arguments = engine_arguments(config, is_in_flight=is_in_flight)
    return json.dumps([asdict(config), speculative_config, architectures, asdict(layout), arguments])
