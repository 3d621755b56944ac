"""A learner and an engine on this machine's GPUs, and how the engine samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.types import Dtype

ENGINE = EngineConfig(
    max_model_len=128, max_num_seqs=16, dtype=Dtype.BFLOAT16, enforce_eager=False, gpu_memory_utilization=0.3
)
SAMPLING = SamplingConfig(temperature=0.0, max_response_tokens=24)


@contextmanager
def learner_and_engine(
    models: Mapping[str, Path], *, part: float = 0.5, can_sleep: bool = False, config: EngineConfig = ENGINE
) -> Iterator[tuple[Any, Any]]:
    """An empty learner and an engine of `config` with the policy `old`, each with `part` of a GPU."""
    import ray

    from slipstream.engine.vllm_engine import VllmEngine, process_environment
    from slipstream.workers.calls import Deadline, Worker
    from slipstream.workers.engines import RemoteEngine
    from slipstream.workers.learner_process import LearnerProcess
    from slipstream.workers.learners import RemoteLearner
    from slipstream.workers.session import actor_environment

    deadline = Deadline(300.0, "fixed")
    environment = {"env_vars": actor_environment(process_environment(config))}
    engine: Any = ray.remote(VllmEngine).options(num_gpus=part, runtime_env=environment)
    actor = engine.remote(models["old"], config=config, speculative_config=None, can_sleep=can_sleep)
    engines = RemoteEngine([Worker(actor, "engine 0")], deadline)
    learner: Any = None
    try:
        engines.states()  # the engine measures the free memory first
        process: Any = ray.remote(LearnerProcess).options(num_gpus=part)
        learns = LearnerConfig(max_tokens_per_microbatch=1024, dtype=Dtype.BFLOAT16)
        learner = RemoteLearner([Worker(process.remote(learns), "learner rank 0")], ParallelConfig(), deadline)
        yield learner, engines
    finally:
        engines.close()
        if learner is not None:
            learner.close()
