"""Rollout engines on Ray: the actor of one engine, the driver's proxy for all engines, and their start."""

from __future__ import annotations

import copy
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import ray

from slipstream.drafts.methods import SCHEDULE
from slipstream.engine.config import Backend, EngineConfig, SamplingConfig
from slipstream.engine.history_drafts import HISTORY
from slipstream.engine.protocol import GenerationResult, GroupRequest, Portion, Trace, group_requests
from slipstream.engine.sglang_engine import PYTHON, SglangDiedError, SglangEngine
from slipstream.engine.vllm_engine import VllmEngine, engine_arguments, process_environment, without_gpu
from slipstream.grpo.config import KvCache
from slipstream.records.steps import ScheduleEntry
from slipstream.refit.channel import Location
from slipstream.refit.config import Channel, EngineState, WeightFiles
from slipstream.refit.fingerprint import Turn
from slipstream.types import Prompt
from slipstream.workers.calls import Crew, Deadline, Idle, LostWorkerError, Proxy, RayEngineControl, Worker, started
from slipstream.workers.cores import set_threads
from slipstream.workers.placement.config import Layout
from slipstream.workers.reservation import Start, require_gpu, reserved
from slipstream.workers.scheduler import Deal, Ledger, SeenLengths, deal, gather, joined, together
from slipstream.workers.session import actor_environment, node_address, require_here

logger = logging.getLogger(__name__)

_SLICE_S = 0.25  # length of a call where there are several engines: a call cannot be ended when another engine is done


class EngineProcess(VllmEngine):
    """A `VllmEngine` in a Ray actor; the engine may share the host's cores with a learner."""

    def __init__(
        self,
        policy: Path,
        *,
        config: EngineConfig,
        speculative_config: dict[str, Any] | None,
        logical_gpus: bool = False,
        **options: Any,
    ) -> None:
        """Start a `VllmEngine` with these arguments and `options`; this host must see the policy and the draft.

        Args:
            logical_gpus: GPUs that Ray assigned to this process are only counted, and the engine may use the CPU.
        Raises:
            PlacementError: the engine would compute on the CPU in spite of an assigned GPU.
        """
        if not logical_gpus:
            require_gpu("engine", problem=without_gpu)
        require_here(policy, draft_directory(speculative_config))
        _name_interface()
        super().__init__(policy, config=config, speculative_config=speculative_config, **options)
        self._most_threads = config.num_threads
        self.watch_ranks(_end_engine)

    def limit_threads(self, num_threads: int | None) -> None:
        """Compute on at most this many threads, beside a learner on the same host; None ends the limit.

        The ranks of a tensor-parallel engine have processes of their own and keep their threads.
        """
        set_threads(min(num_threads or self._most_threads, self._most_threads))

    def refit(self, weights: WeightFiles) -> EngineState:
        """Refit the engine from files that this host must see."""
        require_here(weights.policy, weights.draft)
        return super().refit(weights)


class SglangProcess(SglangEngine):
    """A `SglangEngine` in a Ray actor, which ends with SGLang's process: Ray then reports a lost engine."""

    def __init__(
        self,
        policy: Path,
        *,
        config: EngineConfig,
        executor: str,
        can_sleep: bool,
        logical_gpus: bool = False,
        **options: Any,
    ) -> None:
        """Start a `SglangEngine` with these arguments and `options`; this host must see the policy."""
        del executor, can_sleep, logical_gpus  # of GPUs, which the recipe refuses
        require_here(policy)
        super().__init__(policy, config=config, **options)

    def call(self, name: str, **arguments: Any) -> Any:
        """Call SGLang's process as `SglangEngine.call` does; its end is this actor's."""
        try:
            return super().call(name, **arguments)
        except SglangDiedError as error:
            logger.error("%s", error)
            os._exit(1)

    def refit(self, weights: WeightFiles) -> EngineState:
        """Refit the engine from files that this host must see."""
        require_here(weights.policy)
        return super().refit(weights)


def _end_engine() -> None:
    """End this process, whose engine has lost a rank: Ray then reports a lost engine, which is replaced."""
    logger.error("a rank of this engine has ended, and the engine ends with it")
    os._exit(1)


def _name_interface() -> None:
    """Name gloo's network interface, for this process and the ranks of a tensor-parallel engine.

    By default gloo resolves the host's name, which may have no address.
    """
    address = node_address()
    if address != "127.0.0.1":
        from slipstream.learner.rendezvous import interface_of

        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address))


def draft_directory(speculative_config: dict[str, Any] | None) -> Path | None:
    """Return the directory of the draft's weights; None without a draft, and for a draft without weights."""
    model = (speculative_config or {}).get("model")
    return None if model is None else Path(model)


class RemoteEngine(Proxy):
    """Driver's proxy for all rollout engines of a run; each method calls every engine at once.

    `slipstream.workers.scheduler` divides the prompts of a call. Generation in flight runs in short calls, and every
    engine is idle between two calls. A refit by another process therefore falls between two steps of every engine.
    """

    def __init__(
        self,
        engines: Sequence[Worker],
        deadline: Deadline,
        *,
        start: Callable[[int], Worker] | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        """Take engines that have started, of which each runs `max_num_seqs` rollouts at once; None sets no limit.

        After a loss, `start` starts the engine of a number again; without it a lost engine stays lost.
        """
        super().__init__(engines, deadline)
        self._start = start
        self._policy_version = 0
        self._max_num_seqs = max_num_seqs
        self._lengths = SeenLengths()
        self._kv_cache: KvCache | None = None  # None outside generation in flight
        self._ledger = Ledger()
        self._held: list[Portion] = []  # not returned yet; kept where another engine was lost

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """Sample the groups of all prompts; the response lengths seen so far decide which engine gets which."""
        requests = group_requests(prompts, group_size=group_size, seed=seed)
        num_engines = len(self.workers)
        num_slots = self._max_num_seqs if num_engines > 1 else None  # a single engine has vLLM's own queue
        dealt = deal(requests, self._lengths, num_engines=num_engines, num_slots=num_slots)
        result = joined(requests, generate_dealt(self._crew, dealt, sampling, self._of("generate")))
        self._lengths.note(result.groups)
        return result

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Restore the seen response lengths at the end of the block."""
        kept = copy.deepcopy(self._lengths)
        try:
            yield
        finally:
            self._lengths = kept

    def run_in_flight(self, kv_cache: KvCache | None) -> None:
        """Set the mode of all engines, and of engines that are started in place of lost ones."""
        self._kv_cache = kv_cache
        self._ledger = Ledger()
        self._held = []
        self._crew.ask("a change of mode", lambda engine: engine.run_in_flight.remote(kv_cache))

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig) -> None:
        """Queue groups; the ledger holds a group for its engine even if the engine turns out to be lost."""
        given = self._ledger.place(requests, [worker.name for worker in self._crew.workers])
        what = "submitting groups"
        self._ask_some(given, what, lambda each: each.actor.submit.remote(given[each.name], sampling=sampling))

    def advance(self, *, max_s: float) -> Portion:
        """Run all engines until one completes a group, about `max_s` seconds have passed, or no group is in flight."""
        end_s = time.monotonic() + max_s
        while self._ledger.requests and not any(portion.groups for portion in self._held):
            self._hold_slice(max(0.0, end_s - time.monotonic()))
            if time.monotonic() >= end_s:
                break
        portions, self._held = self._held, []
        return together(portions, num_engines=len(self._crew.workers))

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        """Restart the unfinished rollouts of these groups with other seeds; returns the number of restarts."""
        told = self._ledger.reseed(indices, seeds)
        what = "a restart of rollouts"
        return sum(self._ask_some(told, what, lambda each: each.actor.restart.remote(told[each.name])))

    def take_lost(self, names: Collection[str]) -> tuple[GroupRequest, ...]:
        """Remove and return the groups that these engines had in flight."""
        return self._ledger.take(names)

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        """Groups that were submitted and are not complete."""
        return self._ledger.requests

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """Set the draft-length schedule of all engines."""
        self._crew.ask(self._of("draft_by"), lambda engine: engine.draft_by.remote(schedule))

    def forget(self) -> None:
        """Let all engines forget earlier generations, whose response lengths are forgotten here."""
        self._lengths = SeenLengths()
        self._crew.ask("forgetting", lambda engine: engine.forget.remote())

    def histories(self) -> list[bytes]:
        """Serialize each engine's history of answers."""
        return self._crew.ask("its history", lambda engine: engine.history.remote())

    def recall(self, histories: Sequence[bytes]) -> None:
        """Let each engine without a history take over one; they are dealt in turn, where engines became more."""
        dealt = zip(self.workers, cycle(histories))  # the second one has no end
        calls = [(engine, engine.actor.recall.remote(history)) for engine, history in dealt]
        self._crew.gather("taking over a history", calls)

    def trace(self, prompts: Sequence[Prompt], *, group_size: int, **settings: Any) -> list[Trace]:
        """Trace rollouts on all engines, with the arguments of `VllmEngine.trace`.

        One engine traces all rollouts of a prompt, so that their seeds are those of a single engine.
        """
        numbers: dict[str, int] = {}
        shares: list[list[int]] = [[] for _ in self.workers]
        for index, prompt in enumerate(prompts):
            shares[numbers.setdefault(prompt.id, len(numbers)) % len(shares)].append(index)
        dealt = [(engine, share) for engine, share in zip(self.workers, shares, strict=True) if share]
        calls = [
            (engine, engine.actor.trace.remote([prompts[i] for i in share], group_size=group_size, **settings))
            for engine, share in dealt
        ]
        found: dict[int, list[Trace]] = {}
        for (_, share), traces in zip(dealt, self._crew.gather(self._of("trace"), calls), strict=True):
            found |= {index: traces[n * group_size : (n + 1) * group_size] for n, index in enumerate(share)}
        return [trace for index in range(len(prompts)) for trace in found[index]]

    def sleep(self) -> None:
        """Put all engines to sleep; an engine wakes when it generates."""
        self._crew.ask(self._of("sleep"), lambda engine: engine.sleep.remote())

    def refit(self, weights: WeightFiles) -> list[EngineState]:
        """Refit every engine; returns the state of each engine after the refit."""
        return self.start_refit(weights)()

    def start_refit(self, weights: WeightFiles) -> Callable[[], list[EngineState]]:
        """Begin to refit every engine and return a function that waits for the states."""
        self._policy_version = weights.policy_version
        return self._crew.start(self._of("refit"), lambda engine: engine.refit.remote(weights))

    def facts(self) -> dict[str, str]:
        """Return what vLLM chose in the first engine; all engines are alike."""
        return self._of_first(self._of("facts"), lambda engine: engine.facts.remote())

    def locations(self) -> list[Location]:
        """Locations of all workers, engine by engine."""
        by_engine = self._crew.ask("locations", lambda engine: engine.locations.remote())
        return [place for places in by_engine for place in places]

    def control(self, channel: Channel, *, timeout_s: float) -> RayEngineControl:
        """Make the control by which a sender in another process calls all engines."""
        num_workers = len(self.locations()) // len(self.workers)
        return RayEngineControl(self.workers, channel=channel, num_workers_each=num_workers, timeout_s=timeout_s)

    def start_adopt(self, *, policy_version: int, draft_version: int | None) -> Callable[[], list[EngineState]]:
        """Let all engines adopt these versions for the weights that they received."""
        self._policy_version = policy_version
        return self._crew.start(
            self._of("adopt"),
            lambda engine: engine.adopt.remote(policy_version=policy_version, draft_version=draft_version),
        )

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """Return the tensor types of the first engine; all engines hold the same tensors."""
        return self._of_first(self._of("weight_dtypes"), lambda engine: engine.weight_dtypes.remote(is_draft=is_draft))

    def start_fingerprints(self, *, is_draft: bool, turn: Turn) -> Callable[[], list[dict[str, int]]]:
        """Begin to fingerprint the last weights that each engine was sent."""
        return self._crew.start(
            self._of("weight_fingerprints"),
            lambda engine: engine.weight_fingerprints.remote(is_draft=is_draft, turn=turn),
        )

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Compute the logprobs of each sequence's tokens on every engine."""
        return self._crew.ask(self._of("token_logprobs"), lambda engine: engine.token_logprobs.remote(sequences))

    def states(self) -> list[EngineState]:
        """Return the versions that each engine holds."""
        return self._crew.ask("state", lambda engine: engine.state.remote())

    def replace(self, lost: Sequence[Worker]) -> None:
        """Start another engine in place of each of `lost`, with the weights of the run's start.

        One that is lost at its start is a LostWorkerError once the others have started.
        """
        names, failed = {engine.name for engine in lost}, list[LostWorkerError]()
        for index, engine in enumerate(self.workers):
            if engine.name in names:  # host and process may differ: an engine may have been replaced before
                ray.kill(engine.actor)
                try:
                    self._begin(index)
                except LostWorkerError as error:
                    failed.append(error)
        _raise_as_one(failed)

    def _begin(self, index: int) -> None:
        """Start the engine of a number again, in the mode and with the limit of the others on its node."""
        assert self._start is not None, "only engines that `start_engine` made can be replaced"
        new = self._start(index)
        self._crew.workers = (*self.workers[:index], new, *self.workers[index + 1 :])
        calls = [] if self._kv_cache is None else [(new, new.actor.run_in_flight.remote(self._kv_cache))]
        if self._limit is not None and new.node_id == self._limit[0]:
            calls.append((new, new.actor.limit_threads.remote(self._limit[1])))
        self._crew.gather(self._of("a change of mode"), calls)

    def _hold_slice(self, max_s: float) -> None:
        """Run every engine that has groups: a single engine for `max_s`, several engines for a short slice.

        Each engine is waited for on its own, so that the groups of one survive the death of another.
        """
        is_alone = len(self._crew.workers) == 1
        arguments = {"max_s": max_s if is_alone else min(max_s, _SLICE_S), "stops_at_first": is_alone}
        busy = [worker for worker in self.workers if self._ledger.of(worker.name)]
        calls = [(worker, worker.actor.advance.remote(**arguments)) for worker in busy]
        lost: list[LostWorkerError] = []
        for call in calls:
            try:
                (portion,) = self._crew.gather("generation in flight", [call])
            except LostWorkerError as error:
                lost.append(error)
                continue
            self._held.append(portion)
            self._ledger.complete(index for index, _ in portion.groups)
        _raise_as_one(lost)

    def _ask_some(self, names: Collection[str], what: str, call: Callable[[Worker], Any]) -> list[Any]:
        calls = [(engine, call(engine)) for engine in self.workers if engine.name in names]
        return self._crew.gather(what, calls)

    def _of(self, what: str) -> str:
        return f"{what} with policy version {self._policy_version}"


def _raise_as_one(lost: Sequence[LostWorkerError]) -> None:
    if lost:
        raise LostWorkerError("; ".join(map(str, lost)), [worker for error in lost for worker in error.workers])


def generate_dealt(crew: Crew, dealt: Deal, sampling: SamplingConfig, what: str) -> list[list[Portion]]:
    """Generate the dealt groups on the engines of `crew`; `what` names the call in errors."""

    def start(index: int, requests: tuple[GroupRequest, ...], is_first: bool, room_for: int | None) -> Any:
        engine = crew.workers[index]
        return engine, engine.actor.generate.remote(requests, sampling=sampling, is_first=is_first, room_for=room_for)

    return gather(dealt, start=start, wait=partial(crew.first_of, what))


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
    returns_routes: bool = False,
) -> Iterator[RemoteEngine]:
    """Start `config.num_engines` engines with the weights of `policy` on the GPUs of `layout`.

    The end of the block closes the engines. If `config.num_kept_idle` > 0, the engines stay alive, and a later block
    with the same settings refits the idle engines to its policy and draft. After an exception all engines are closed,
    as their weights are unknown.

    Args:
        kv_cache: treatment of the rollouts' KV cache at a refit, for generation in flight; None for other generation.
        returns_routes: True if rollouts have `routes`.
    """
    is_in_flight = kv_cache is not None
    # The key holds all that a refit cannot change.
    draft = draft_directory(speculative_config)
    architectures = [(model / "config.json").read_text() for model in (policy, draft) if model is not None]
    how = {"is_in_flight": is_in_flight, "returns_routes": returns_routes}
    arguments = engine_arguments(config, **how)
    key = json.dumps([asdict(config), speculative_config, architectures, asdict(layout), arguments])
    with idle_engines.lent(
        key, lambda: _new_engine(policy, config, speculative_config, layout, how), capacity=config.num_kept_idle
    ) as (engine, is_kept):
        if is_kept:
            _start_again(engine, WeightFiles(policy=policy, policy_version=0, draft=draft), speculative_config or {})
        if is_in_flight:
            engine.run_in_flight(kv_cache)
        yield engine


def _start_again(engine: RemoteEngine, weights: WeightFiles, speculative_config: Mapping[str, Any]) -> None:
    """Undo what an earlier block has changed in idle engines, and give them other weights."""
    engine.run_in_flight(None)
    engine.refit(weights)
    if speculative_config.get("method") == HISTORY:
        engine.forget()
    if SCHEDULE in speculative_config:
        entries = speculative_config[SCHEDULE]
        engine.draft_by(
            [ScheduleEntry(batch_from=low, batch_to=high, num_speculative_tokens=k) for low, high, k in entries]
        )


def _new_engine(
    policy: Path, config: EngineConfig, speculative_config: dict[str, Any] | None, layout: Layout, how: dict[str, bool]
) -> RemoteEngine:
    starting = Deadline(config.start_timeout_s, "engine.start_timeout_s")

    def begin(index: int) -> Worker:
        reservation = reserved(layout)
        if reservation is None:  # Ray chooses the node
            executor = "uni" if config.tensor_parallel_size == 1 else "mp"
            start = Start(place={"num_gpus": 0}, environment={}, executor=executor)
        else:
            start = reservation.engine_start(index)
        is_vllm = config.backend is Backend.VLLM
        own = process_environment(config) if is_vllm else {PYTHON: os.environ.get(PYTHON, "")}
        environment = actor_environment({**own, **start.environment})
        # Learner and engine share the cores, so Ray reserves none.
        options = {"num_cpus": 0, **start.place, "runtime_env": {"env_vars": environment}}
        process = ray.remote(EngineProcess if is_vllm else SglangProcess).options(**options)
        actor = process.remote(
            policy,
            config=config,
            speculative_config=speculative_config,
            executor=start.executor,
            **how,
            can_sleep=layout.placement.takes_turns,
            logical_gpus=layout.placement.logical_gpus,
        )
        return Worker(actor, f"engine {index}")

    def replacement(index: int) -> Worker:
        return started([begin(index)], starting)[0]

    logger.info("starting an engine with k=%d", (speculative_config or {}).get("num_speculative_tokens", 0))
    engines = started([begin(index) for index in range(config.num_engines)], starting)
    return RemoteEngine(
        engines,
        Deadline(config.answer_timeout_s, "engine.answer_timeout_s"),
        start=replacement,
        max_num_seqs=config.max_num_seqs,
    )
