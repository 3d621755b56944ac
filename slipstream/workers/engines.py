"""Rollout engines as a driver sees them: processes that share the prompts, and are kept warm between stages."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from slipstream.placement.config import Layout
from slipstream.refit.channel.choice import Location
from slipstream.refit.config import Channel, EngineState
from slipstream.rollout.config import EngineConfig, SamplingConfig
from slipstream.rollout.dealing import SeenLengths, deal
from slipstream.rollout.engine import GenerationResult, Portion, Trace
from slipstream.rollout.gathering import Call, gather, joined
from slipstream.rollout.requests import group_requests
from slipstream.rollout.vllm_engine import VllmEngine, process_environment
from slipstream.types import Prompt
from slipstream.workers.engine_control import RayEngineControl
from slipstream.workers.idle import Idle
from slipstream.workers.placement import Reservation, Start, reserved
from slipstream.workers.session import actor_environment, is_alive, wait_until_ready

logger = logging.getLogger(__name__)


class RemoteEngine:
    """Rollout engines in processes of their own that share the prompts of each call: see `slipstream.rollout.dealing`.

    Args:
        max_num_seqs: rollouts that each engine runs at once; None: as many as it is asked for.
    """

    def __init__(self, actors: Sequence[Any], *, max_num_seqs: int | None = None) -> None:
        self._actors = list(actors)
        self._max_num_seqs = max_num_seqs
        self._lengths = SeenLengths()

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """See `Engine.generate`."""
        requests = group_requests(prompts, group_size=group_size, seed=seed)
        num_engines = len(self._actors)
        num_slots = self._max_num_seqs if num_engines > 1 else None  # one engine queues what it has no room for itself
        dealt = deal(requests, self._lengths, num_engines=num_engines, num_slots=num_slots)
        result = joined(requests, gather(RunningEngines(self._actors, sampling), dealt))
        self._lengths.note(result.groups)
        return result

    def trace(self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int) -> list[Trace]:
        """See `VllmEngine.trace`; the first engine answers for all: they hold the same weights."""
        return ray.get(self._actors[0].trace.remote(prompts, sampling=sampling, group_size=group_size, seed=seed))

    def refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> list[EngineState]:
        """Refit every engine; returns what each holds when all have the new weights."""
        return ray.get(
            [
                actor.refit.remote(policy, policy_version=policy_version, draft=draft, draft_version=draft_version)
                for actor in self._actors
            ]
        )

    def locations(self) -> list[Location]:
        """Where each worker of each engine computes, engine by engine."""
        return [place for places in ray.get([actor.locations.remote() for actor in self._actors]) for place in places]

    def control(self, channel: Channel, *, timeout_s: float) -> RayEngineControl:
        """What a sender in another process steers all engines with."""
        workers = [len(places) for places in ray.get([actor.locations.remote() for actor in self._actors])]
        return RayEngineControl(self._actors, channel=channel, num_workers_each=workers[0], timeout_s=timeout_s)

    def adopt(self, *, policy_version: int, draft_version: int | None) -> list[EngineState]:
        """See `VllmEngine.adopt`; one state an engine."""
        return ray.get(
            [actor.adopt.remote(policy_version=policy_version, draft_version=draft_version) for actor in self._actors]
        )

    def weight_dtypes(self, *, is_draft: bool) -> dict[str, str]:
        """See `VllmEngine.weight_dtypes`; all engines hold the same tensors."""
        return ray.get(self._actors[0].weight_dtypes.remote(is_draft=is_draft))

    def weight_fingerprints(self, *, is_draft: bool) -> list[dict[str, int]]:
        """See `VllmEngine.weight_fingerprints`; one dict an engine."""
        return ray.get([actor.weight_fingerprints.remote(is_draft=is_draft) for actor in self._actors])

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """See `VllmEngine.token_logprobs`; one answer an engine."""
        return ray.get([actor.token_logprobs.remote(sequences) for actor in self._actors])

    def states(self) -> list[EngineState]:
        """See `VllmEngine.state`; one an engine."""
        return ray.get([actor.state.remote() for actor in self._actors])

    def is_alive(self) -> bool:
        """Whether every engine's process still answers."""
        return is_alive(self._actors)

    def close(self) -> None:
        """End the engines' processes: vLLM frees its memory in no other way."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()


class RunningEngines:
    """The engines' actors during one generation, as `gather` sees them."""

    def __init__(self, actors: Sequence[Any], sampling: SamplingConfig) -> None:
        self._actors = actors
        self._sampling = sampling

    def start(self, engine: int, call: Call) -> Any:
        """See `slipstream.rollout.gathering.Engines`."""
        return self._actors[engine].generate.remote(
            call.requests, sampling=self._sampling, is_first=call.is_first, room_for=call.room_for
        )

    def wait(self, calls: Sequence[Any]) -> tuple[Any, Portion]:
        """See `slipstream.rollout.gathering.Engines`."""
        done, _ = ray.wait(list(calls), num_returns=1)
        return done[0], ray.get(done[0])


_ANYWHERE = Layout()
_idle_engines: Idle[RemoteEngine] = Idle(is_alive=RemoteEngine.is_alive, close=RemoteEngine.close)


@contextmanager
def start_engine(
    policy: Path,
    *,
    config: EngineConfig,
    speculative_config: dict[str, Any] | None = None,
    layout: Layout = _ANYWHERE,
) -> Iterator[RemoteEngine]:
    """`config.num_engines` engines that hold `policy`, for the span of the block, on the GPUs that `layout` says.

    With `config.num_kept_idle` > 0 they outlive the block, and a later one that asks for the same settings gets them
    back, refitted to its own policy and draft. After an exception they end: nobody knows what they hold.
    """
    key = _engine_key(policy, config, speculative_config, layout)
    engine = _idle_engines.take(key)
    try:
        if engine is None:
            engine = _new_engine(policy, config, speculative_config, layout)
        else:
            draft = None if speculative_config is None else Path(speculative_config["model"])
            engine.refit(policy, policy_version=0, draft=draft)
        yield engine
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    _idle_engines.put(key, engine, capacity=config.num_kept_idle)


def _new_engine(
    policy: Path, config: EngineConfig, speculative_config: dict[str, Any] | None, layout: Layout
) -> RemoteEngine:
    k = speculative_config["num_speculative_tokens"] if speculative_config else 0
    logger.info("starting an engine with k=%d", k)
    reservation, actors = reserved(layout), []
    for index in range(config.num_engines):
        start = _start(reservation, index, config)
        environment = actor_environment({**process_environment(config), **start.environment})
        # Learner and engine share the cores, in turn.
        options = {"num_cpus": 0, **start.place, "runtime_env": {"env_vars": environment}}
        actor = ray.remote(VllmEngine).options(**options)
        actors.append(
            actor.remote(policy, config=config, speculative_config=speculative_config, executor=start.executor)
        )
    engine = RemoteEngine(actors, max_num_seqs=config.max_num_seqs)
    try:
        wait_until_ready(actors)
    except BaseException:
        engine.close()
        raise
    return engine


def _start(reservation: Reservation | None, index: int, config: EngineConfig) -> Start:
    """How an engine starts: on its GPUs, or without any wherever Ray puts it."""
    if reservation is not None:
        return reservation.engine_start(index)
    return Start(place={"num_gpus": 0}, environment={}, executor="uni" if config.tensor_parallel_size == 1 else "mp")


def _engine_key(policy: Path, config: EngineConfig, speculative_config: dict[str, Any] | None, layout: Layout) -> str:
    """What cannot be changed by a refit: the engine's settings and place, the architectures of policy and draft."""
    models = [policy] if speculative_config is None else [policy, Path(speculative_config["model"])]
    architectures = [(model / "config.json").read_text() for model in models]
    return json.dumps([asdict(config), speculative_config, architectures, asdict(layout)])
