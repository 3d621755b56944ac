"""Rollout engines as a driver sees them: processes that share the prompts, and are kept warm between stages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from slipstream.drafts.methods import SCHEDULE
from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.protocol import GenerationResult, Portion, Trace, WeightFiles
from slipstream.engine.requests import group_requests
from slipstream.engine.vllm_engine import device_arguments, process_environment
from slipstream.grpo.loop_config import KvCache
from slipstream.records.steps import ScheduleEntry
from slipstream.refit.channel.choice import Location
from slipstream.refit.config import Channel, EngineState
from slipstream.refit.fingerprint import Turn
from slipstream.types import Prompt
from slipstream.workers.calls import Crew, Deadline, Worker, is_alive, started
from slipstream.workers.cores import CoreSlot
from slipstream.workers.dealing import SeenLengths, deal
from slipstream.workers.engine_control import RayEngineControl
from slipstream.workers.engine_process import EngineProcess, draft_directory
from slipstream.workers.file_server import open_stores
from slipstream.workers.gathering import Call, gather, joined
from slipstream.workers.idle import Idle
from slipstream.workers.in_flight_engines import InFlightEngines
from slipstream.workers.placement.config import Layout
from slipstream.workers.reservation import Reservation, Start, reserved
from slipstream.workers.session import actor_environment, own_node

logger = logging.getLogger(__name__)


class RemoteEngine(InFlightEngines):
    """Rollout engines in processes of their own; `slipstream.workers.dealing` says how they share a call's prompts."""

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
        super().__init__(Crew(engines, deadline))
        self._deadline = deadline
        self._start = start
        self._policy_version = 0
        self._max_num_seqs = max_num_seqs
        self._lengths = SeenLengths()
        self._slots: tuple[CoreSlot | None, ...] = ()  # in the cores of the host; empty: they share none

    @property
    def engines(self) -> tuple[Worker, ...]:
        """The actors and where they run."""
        return self._crew.workers

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """See `Engine.generate`."""
        requests = group_requests(prompts, group_size=group_size, seed=seed)
        num_engines = len(self.engines)
        num_slots = self._max_num_seqs if num_engines > 1 else None  # one engine queues what it has no room for itself
        dealt = deal(requests, self._lengths, num_engines=num_engines, num_slots=num_slots)
        result = joined(requests, gather(RunningEngines(self._crew, sampling, self._of("generate")), dealt))
        self._lengths.note(result.groups)
        return result

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The same as `engines`."""
        return self.engines

    def share_cores(self, slots: Sequence[CoreSlot | None]) -> None:
        """See `EngineProcess.share_cores`; one an engine."""
        self._slots = tuple(slots)
        calls = [(each, each.actor.share_cores.remote(slot)) for each, slot in zip(self.engines, slots, strict=True)]
        self._crew.gather("share_cores", calls)

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """See `VllmEngine.draft_by`; all engines."""
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
        """See `VllmEngine.trace`; the first engine answers for all: they hold the same weights."""
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

    def rest(self) -> None:
        """See `VllmEngine.rest`; all engines. Each takes its memory again when it is asked to generate."""
        self._crew.ask(self._of("rest"), lambda engine: engine.rest.remote())

    def refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> list[EngineState]:
        """Refit every engine; returns what each holds when all have the new weights."""
        return self.start_refit(policy, policy_version=policy_version, draft=draft, draft_version=draft_version)()

    def start_refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> Callable[[], list[EngineState]]:
        """The same; what it returns waits."""
        self._policy_version = policy_version
        return self._crew.start(
            self._of("refit"),
            lambda engine: engine.refit.remote(
                policy, policy_version=policy_version, draft=draft, draft_version=draft_version
            ),
        )

    def locations(self) -> list[Location]:
        """Where each worker of each engine computes, engine by engine."""
        return [place for places in self._locations() for place in places]

    def control(self, channel: Channel, *, timeout_s: float) -> RayEngineControl:
        """What a sender in another process steers all engines with."""
        num_workers = len(self._locations()[0])
        return RayEngineControl(self.engines, channel=channel, num_workers_each=num_workers, timeout_s=timeout_s)

    def start_adopt(self, *, policy_version: int, draft_version: int | None) -> Callable[[], list[EngineState]]:
        """See `VllmEngine.adopt`; what it returns waits for the states, one an engine."""
        self._policy_version = policy_version
        return self._crew.start(
            self._of("adopt"),
            lambda engine: engine.adopt.remote(policy_version=policy_version, draft_version=draft_version),
        )

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """See `VllmEngine.weight_dtypes`; all engines hold the same tensors."""
        return self._of_first("weight_dtypes", lambda engine: engine.weight_dtypes.remote(is_draft=is_draft))

    def start_fingerprints(self, *, is_draft: bool, turn: Turn) -> Callable[[], list[dict[str, int]]]:
        """See `VllmEngine.weight_fingerprints`; what it returns waits for them, one dict an engine.

        An engine does what it is asked in the order in which it is asked: they are of the weights that it was told to
        take last.
        """
        return self._crew.start(
            self._of("weight_fingerprints"),
            lambda engine: engine.weight_fingerprints.remote(is_draft=is_draft, turn=turn),
        )

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """See `VllmEngine.token_logprobs`; one answer an engine."""
        return self._crew.ask(self._of("token_logprobs"), lambda engine: engine.token_logprobs.remote(sequences))

    def states(self) -> list[EngineState]:
        """See `VllmEngine.state`; one an engine."""
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
        new = [engine for engine in engines if engine.name in names]
        if self._kv_cache is not None:
            calls = [(engine, engine.actor.run_in_flight.remote(self._kv_cache)) for engine in new]
            self._crew.gather(self._of("a change of mode"), calls)
        if self._slots:  # a lost engine may have said that it works, which whoever has its slot alone takes back
            slots = {engine.name: slot for engine, slot in zip(engines, self._slots, strict=True)}
            calls = [(engine, engine.actor.share_cores.remote(slots[engine.name])) for engine in new]
            self._crew.gather(self._of("share_cores"), calls)

    def is_alive(self) -> bool:
        """Whether every engine's process still answers."""
        return is_alive(self.engines)

    def close(self) -> None:
        """End the engines' processes: vLLM frees its memory in no other way."""
        for engine in self.engines:
            ray.kill(engine.actor)

    def _locations(self) -> list[list[Location]]:
        return self._crew.ask("locations", lambda engine: engine.locations.remote())

    def _of_first(self, what: str, call: Callable[[Any], Any]) -> Any:
        first = self.engines[0]
        return self._crew.gather(self._of(what), [(first, call(first.actor))])[0]

    def _of(self, what: str) -> str:
        return f"{what} with policy version {self._policy_version}"


class RunningEngines:
    """The engines' actors during one generation, as `gather` sees them."""

    def __init__(self, crew: Crew, sampling: SamplingConfig, what: str) -> None:
        self._crew = crew
        self._sampling = sampling
        self._what = what
        self._running: dict[Any, Worker] = {}

    def start(self, engine: int, call: Call) -> Any:
        """See `slipstream.workers.gathering.Engines`."""
        worker = self._crew.workers[engine]
        started = worker.actor.generate.remote(
            call.requests, sampling=self._sampling, is_first=call.is_first, room_for=call.room_for
        )
        self._running[started] = worker
        return started

    def wait(self, calls: Sequence[Any]) -> tuple[Any, Portion]:
        """See `slipstream.workers.gathering.Engines`, and `answers` for errors."""
        done = self._crew.first_of(self._what, [(self._running[call], call) for call in calls])
        (portion,) = self._crew.gather(self._what, [(self._running.pop(done), done)])
        return done, portion


_ANYWHERE = Layout()
_idle_engines: Idle[RemoteEngine] = Idle(is_alive=RemoteEngine.is_alive, close=RemoteEngine.close)


@contextmanager
def start_engine(
    policy: Path,
    *,
    config: EngineConfig,
    speculative_config: dict[str, Any] | None = None,
    layout: Layout = _ANYWHERE,
    kv_cache: KvCache | None = None,
) -> Iterator[RemoteEngine]:
    """`config.num_engines` engines that hold `policy`, for the span of the block, on the GPUs that `layout` says.

    With `kv_cache` they run in flight: rollouts outlive a refit, and that becomes of their keys and values.

    With `config.num_kept_idle` > 0 they outlive the block, and a later one that asks for the same settings gets them
    back, refitted to its own policy and draft. After an exception they end: nobody knows what they hold.
    """
    is_in_flight = kv_cache is not None
    key = _engine_key(policy, config, speculative_config, layout, is_in_flight=is_in_flight)
    engine = _idle_engines.take(key)
    try:
        if engine is None:
            engine = _new_engine(policy, config, speculative_config, layout, is_in_flight=is_in_flight)
        else:
            engine.run_in_flight(None)
            engine.refit(policy, policy_version=0, draft=draft_directory(speculative_config))
            if speculative_config is not None and SCHEDULE in speculative_config:  # its last user may have changed it
                engine.draft_by([_entry(*each) for each in speculative_config[SCHEDULE]])
        if is_in_flight:
            engine.run_in_flight(kv_cache)
        yield engine
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    _idle_engines.put(key, engine, capacity=config.num_kept_idle)


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
                can_rest=layout.placement.takes_turns,
                origin=own_node(),
                logical_gpus=layout.placement.logical_gpus,
            )
        )
        return Worker(actor, f"engine {index}")

    def replacement(index: int) -> Worker:
        return started([begin(index)], starting)[0]

    logger.info("starting an engine with k=%d", k)
    open_stores()
    engines = started([begin(index) for index in range(config.num_engines)], starting)
    return RemoteEngine(
        engines,
        Deadline(config.answer_timeout_s, "engine.answer_timeout_s"),
        start=replacement,
        max_num_seqs=config.max_num_seqs,
    )


def _entry(batch_from: int, batch_to: int, k: int) -> ScheduleEntry:
    return ScheduleEntry(batch_from=batch_from, batch_to=batch_to, num_speculative_tokens=k)


def _start(reservation: Reservation | None, index: int, config: EngineConfig) -> Start:
    """How an engine starts: on its GPUs, or without any wherever Ray puts it."""
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
    """What cannot be changed by a refit: the engine's settings and place, the architectures of policy and draft."""
    draft = draft_directory(speculative_config)
    models = [policy] if draft is None else [policy, draft]
    architectures = [(model / "config.json").read_text() for model in models]
    arguments = device_arguments(config, is_in_flight=is_in_flight)
    return json.dumps([asdict(config), speculative_config, architectures, asdict(layout), arguments])
