"""An engine on a GPU beside a learner: the channel that `auto` takes, 8 bits, and memory that both have in turn.

Stages 4, 7 and 10 of gpu-check (`test_gpu_check.py`) show that IPC and NCCL bring the right bits, and steps of both in
turn. What is free is read from the driver, over all processes: what torch or vLLM keeps for itself does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.engine.vllm_engine import VllmEngine, process_environment
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.refit.channel import open_channel, send
from slipstream.refit.config import RefitConfig, WeightFiles
from slipstream.refit.fingerprint import ALL
from slipstream.types import Dtype, Quantization
from slipstream.workers.calls import Deadline, Worker
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.learner_process import LearnerProcess
from slipstream.workers.learners import RemoteLearner
from slipstream.workers.session import actor_environment
from tests.small import PROMPTS, gate_of, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ENGINE = EngineConfig(
    max_model_len=128, max_num_seqs=16, dtype=Dtype.BFLOAT16, enforce_eager=False, gpu_memory_utilization=0.3
)
SAMPLING = SamplingConfig(temperature=0.0, max_response_tokens=24)


@contextmanager
def learner_and_engine(
    models: Mapping[str, Path], *, can_sleep: bool = False, config: EngineConfig = ENGINE
) -> Iterator[tuple[Any, Any]]:
    """An empty learner and an engine of `config` with the policy `old`, each with half of a GPU."""
    deadline = Deadline(300.0, "fixed")
    environment = {"env_vars": actor_environment(process_environment(config))}
    engine: Any = ray.remote(VllmEngine).options(num_gpus=0.5, runtime_env=environment)
    actor = engine.remote(models["old"], config=config, speculative_config=None, can_sleep=can_sleep)
    engines = RemoteEngine([Worker(actor, "engine 0")], deadline)
    learner: Any = None
    try:
        engines.states()  # the engine measures the free memory first
        process: Any = ray.remote(LearnerProcess).options(num_gpus=0.5)
        learns = LearnerConfig(max_tokens_per_microbatch=1024, dtype=Dtype.BFLOAT16)
        learner = RemoteLearner([Worker(process.remote(learns), "learner rank 0")], ParallelConfig(), deadline)
        yield learner, engines
    finally:
        engines.close()
        if learner is not None:
            learner.close()


def test_auto_is_ipc_where_learner_and_engine_share_a_gpu(models: dict[str, Path], ray_session: None) -> None:
    with learner_and_engine(models) as (learner, engines):
        learner.load(models["new"], None)
        with open_channel(RefitConfig(), learner, engines) as channel:
            assert send(channel, 1).origin == "the ipc channel"


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.FP8])
def test_an_engine_holds_what_the_learner_quantizes(
    quantization: Quantization, models: dict[str, Path], ray_session: None
) -> None:
    """vLLM's reload takes 8 bits over IPC, and rounds what it reads from a directory to the same."""
    config = replace(ENGINE, quantization=quantization)
    with learner_and_engine(models, config=config) as (learner, engines):
        engines.refit(WeightFiles(policy=models["new"], policy_version=1))
        from_directory = engines.start_fingerprints(is_draft=False, turn=ALL)()
        engines.refit(WeightFiles(policy=models["old"], policy_version=2))
        assert engines.start_fingerprints(is_draft=False, turn=ALL)() != from_directory
        learner.load(models["new"], None, sent_as=config.weight_format)
        with open_channel(RefitConfig(), learner, engines) as channel:
            gate_of(engines, learner, channel).refit(3)
        assert engines.start_fingerprints(is_draft=False, turn=ALL)() == from_directory


def test_an_engine_without_its_cache_is_refitted_and_then_generates(models: dict[str, Path], ray_session: None) -> None:
    with learner_and_engine(models, can_sleep=True) as (_, engines):
        before = engines.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=0)
        free, total = torch.cuda.mem_get_info()

        def num_freed() -> int:
            return torch.cuda.mem_get_info()[0] - free

        engines.sleep()
        assert num_freed() > 0.2 * total  # of the 0.3 that it has, nearly all is cache
        engines.refit(WeightFiles(policy=models["new"], policy_version=1))
        (new,) = engines.start_fingerprints(is_draft=False, turn=ALL)()
        engines.token_logprobs([PROMPTS[0].token_ids])
        assert num_freed() > 0.2 * total  # it took its cache for that, and gave it back
        changed = engines.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=0)
        assert abs(num_freed()) < 0.02 * total
        assert tokens(changed) != tokens(before)
        engines.sleep()
        engines.refit(WeightFiles(policy=models["old"], policy_version=2))
        assert engines.start_fingerprints(is_draft=False, turn=ALL)() != [new]
        assert tokens(engines.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=0)) == tokens(before)
