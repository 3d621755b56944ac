"""The processes of a run, as Ray actors: one or more learner ranks and rollout engines (the only ray import).

A driver sees a `RemoteEngine`, which is a `RolloutEngine`, and a `RemoteLearner`. Both share the accelerators
(colocated), so the loop never has them work at the same time.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from slipstream.fingerprint import WeightPart
from slipstream.loop.idle import IdleEngines
from slipstream.loop.learner import LearnerWorker
from slipstream.policy.config import LearnerConfig
from slipstream.records import AcceptanceStats
from slipstream.rollout.acceptance import combine
from slipstream.rollout.config import EngineConfig, SamplingConfig
from slipstream.rollout.engine import EngineState, GenerationResult, Trace
from slipstream.rollout.vllm_engine import VllmEngine, process_environment
from slipstream.types import Prompt, TrainBatch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slipstream.grpo.loss import LossConfig
    from slipstream.policy.stats import TrainStats
    from slipstream.refit import Snapshot

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 200 << 20
# Ray would give way to every other process: timed work must not.
_LOCAL_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
_PASSED_ON = ("HF_HUB_OFFLINE", "DO_NOT_TRACK", "PYTHONPATH")


@contextmanager
def session() -> Iterator[None]:
    """Connect to Ray: a cluster's if the task was given one, else a local instance that outlives this block.

    A local instance takes seconds to start, so the tasks of one process share it; it ends with the process.
    """
    if not ray.is_initialized():
        logger.info("starting Ray")
        for name, value in _LOCAL_RAY.items():
            os.environ.setdefault(name, value)
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    yield


class RemoteEngine:
    """Rollout engines in processes of their own, the prompts dealt out to them in turn."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """See `RolloutEngine.generate`; `generation_s` is that of the slowest engine."""
        num = len(self._actors)
        calls = [
            actor.generate.remote(prompts[i::num], sampling=sampling, group_size=group_size, seed=seed + i)
            for i, actor in enumerate(self._actors)
            if prompts[i::num]
        ]
        parts: list[GenerationResult] = ray.get(calls)
        groups = [parts[i % num].groups[i // num] for i in range(len(prompts))]
        known: list[AcceptanceStats] = [part.acceptance for part in parts if part.acceptance is not None]
        return GenerationResult(
            groups=tuple(groups),
            acceptance=combine(known) if known else None,
            generation_s=max(part.generation_s for part in parts),
        )

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

    def weight_parts(self, *, is_draft: bool) -> list[WeightPart]:
        """See `VllmEngine.weight_parts`; all engines are sharded alike."""
        return ray.get(self._actors[0].weight_parts.remote(is_draft=is_draft))

    def weight_fingerprints(self, *, is_draft: bool) -> list[dict[str, str]]:
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
        try:
            _wait_until_ready(self._actors)
        except RayActorError:
            return False
        return True

    def close(self) -> None:
        """End the engines' processes: vLLM frees its memory in no other way."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()


class RemoteLearner:
    """The learner's ranks. A method runs on all of them at once; the result is rank 0's."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)

    @property
    def actors(self) -> tuple[Any, ...]:
        """The ranks, rank 0 first."""
        return tuple(self._actors)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `LearnerWorker.<method>` on every rank."""
        shared = [ray.put(arg) for arg in args] if len(self._actors) > 1 else args
        return ray.get([getattr(actor, method).remote(*shared, **kwargs) for actor in self._actors])[0]

    def lm_step(
        self, sequences: Sequence[Sequence[int]], loss_starts: Sequence[int], *, learning_rate: float | None = None
    ) -> float:
        """See `slipstream.policy.pretrain.LanguageModel`."""
        return self.call("lm_step", sequences, loss_starts, learning_rate=learning_rate)

    def logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]]:
        """See `slipstream.loop.sync.Learner`."""
        return self.call("logprobs", batch, temperature)

    def ref_logprobs(self, batch: TrainBatch, temperature: float) -> list[NDArray[np.float32]] | None:
        """See `slipstream.loop.sync.Learner`."""
        return self.call("ref_logprobs", batch, temperature)

    def conditionals(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], sampling: SamplingConfig, *, seed: int
    ) -> NDArray[np.float64]:
        """See `LearnerWorker.conditionals`."""
        return self.call("conditionals", sequences, prompt_lengths, sampling, seed=seed)

    def next_token_probabilities(
        self, prefixes: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> NDArray[np.float64]:
        """See `LearnerWorker.next_token_probabilities`."""
        return self.call("next_token_probabilities", prefixes, sampling)

    def train_step(
        self,
        batch: TrainBatch,
        trainer_logprobs: list[NDArray[np.float32]],
        ref_logprobs: list[NDArray[np.float32]] | None,
        loss: LossConfig,
        temperature: float,
    ) -> TrainStats:
        """See `slipstream.loop.sync.Learner`."""
        return self.call("train_step", batch, trainer_logprobs, ref_logprobs, loss, temperature)

    def weight_fingerprints(self, parts: Sequence[WeightPart]) -> dict[str, str]:
        """See `LearnerWorker.weight_fingerprints`."""
        return self.call("weight_fingerprints", parts)

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """See `LearnerWorker.token_logprobs`."""
        return self.call("token_logprobs", sequences)

    def publish(self, directory: Path, version: int) -> Snapshot:
        """See `slipstream.loop.sync.Learner`."""
        return self.call("publish", directory, version)

    def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> None:
        """See `slipstream.loop.sync.Learner`."""
        self.call("save_checkpoint", path, extra)

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """See `slipstream.loop.sync.Learner`."""
        return self.call("load_checkpoint", path)

    def close(self) -> None:
        """End the ranks' processes."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()


_idle_engines: IdleEngines[RemoteEngine] = IdleEngines(is_alive=RemoteEngine.is_alive, close=RemoteEngine.close)


@contextmanager
def start_engine(
    policy: Path, *, config: EngineConfig, speculative_config: dict[str, Any] | None = None
) -> Iterator[RemoteEngine]:
    """`config.num_engines` engines that hold `policy`, for the span of the block.

    With `config.num_kept_idle` > 0 they outlive the block, and a later one that asks for the same settings gets them
    back, refitted to its own policy and draft. After an exception they end: nobody knows what they hold.
    """
    key = _engine_key(policy, config, speculative_config)
    engine = _idle_engines.take(key)
    try:
        if engine is None:
            engine = _new_engine(policy, config, speculative_config)
        else:
            draft = None if speculative_config is None else Path(speculative_config["model"])
            engine.refit(policy, policy_version=0, draft=draft)
        yield engine
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    _idle_engines.put(key, engine, capacity=config.num_kept_idle)


def _new_engine(policy: Path, config: EngineConfig, speculative_config: dict[str, Any] | None) -> RemoteEngine:
    options = {
        "num_cpus": 0,  # learner and engine share the cores, in turn
        "num_gpus": 0 if config.kv_cache_gib is not None else config.tensor_parallel_size,
        "runtime_env": {"env_vars": _environment(process_environment(config))},
    }
    k = speculative_config["num_speculative_tokens"] if speculative_config else 0
    logger.info("starting an engine with k=%d", k)
    actor = ray.remote(VllmEngine).options(**options)
    actors = [
        actor.remote(policy, config=config, speculative_config=speculative_config) for _ in range(config.num_engines)
    ]
    engine = RemoteEngine(actors)
    try:
        _wait_until_ready(actors)
    except BaseException:
        engine.close()
        raise
    return engine


def _engine_key(policy: Path, config: EngineConfig, speculative_config: dict[str, Any] | None) -> str:
    """What cannot be changed by a refit: the engine's settings and the architectures of policy and draft."""
    models = [policy] if speculative_config is None else [policy, Path(speculative_config["model"])]
    architectures = [(model / "config.json").read_text() for model in models]
    return json.dumps([asdict(config), speculative_config, architectures])


@contextmanager
def start_learner(config: LearnerConfig) -> Iterator[RemoteLearner]:
    """Start the learner's ranks, without a model yet, and end them with the block."""
    world_size = config.parallel.world_size
    threads = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
    # The learner shares its GPU with an engine, so it asks Ray for a sliver of one: placement, not a limit.
    num_gpus = 0.01 if ray.cluster_resources().get("GPU") else 0
    options = {"num_cpus": 0, "num_gpus": num_gpus, "runtime_env": {"env_vars": _environment(threads)}}
    actor = ray.remote(LearnerWorker).options(**options)
    port = _free_port()
    learner = RemoteLearner(
        [actor.remote(config, rank=rank, world_size=world_size, master_port=port) for rank in range(world_size)]
    )
    try:
        _wait_until_ready(learner.actors)
        yield learner
    finally:
        learner.close()


def _wait_until_ready(actors: Sequence[Any]) -> None:
    """An actor that is still starting would put its start on the clock of whoever calls it first."""
    ray.get([actor.__ray_ready__.remote() for actor in actors])


def _environment(own: dict[str, str]) -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, **own}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
