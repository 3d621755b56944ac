"""The channels between GPUs, on real ones: what arrives is what shared memory brings, to the last bit.

CUDA IPC runs on any one GPU, which learner and engine share; NCCL needs two. Not run so far: no GPU was at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.config import EngineConfig, SamplingConfig
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.refit.channel import open_channel, send
from slipstream.refit.config import Channel, RefitConfig
from slipstream.refit.gate import RefitGate
from slipstream.types import Dtype
from tests.small import PROMPTS, require_equal, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ENGINE = EngineConfig(
    max_model_len=128, max_num_seqs=16, dtype=Dtype.BFLOAT16, enforce_eager=False, gpu_memory_utilization=0.3
)
SAMPLING = SamplingConfig(temperature=0.0, max_response_tokens=24)


@contextmanager
def _ends(models: Mapping[str, Path], *, share: bool) -> Iterator[tuple[Any, Any]]:
    """A learner with the policy `new` and an engine with `old`, on one GPU or on one each."""
    import ray

    from slipstream.engine.vllm_engine import VllmEngine, process_environment
    from slipstream.workers.calls import Deadline, Worker
    from slipstream.workers.engines import RemoteEngine
    from slipstream.workers.learner_process import LearnerProcess
    from slipstream.workers.learners import RemoteLearner
    from slipstream.workers.session import actor_environment

    part, deadline = 0.5 if share else 1.0, Deadline(300.0, "fixed")
    environment = {"env_vars": actor_environment(process_environment(ENGINE))}
    engine: Any = ray.remote(VllmEngine).options(num_gpus=part, runtime_env=environment)
    actor = engine.remote(models["old"], config=ENGINE, speculative_config=None)
    engines = RemoteEngine([Worker(actor, "engine 0")], deadline)
    learner: Any = None
    try:
        engines.states()  # it measures the free memory first
        process: Any = ray.remote(LearnerProcess).options(num_gpus=part)
        rank = Worker(process.remote(LearnerConfig(dtype=Dtype.BFLOAT16)), "learner rank 0")
        learner = RemoteLearner([rank], ParallelConfig(), deadline)
        learner.load(models["new"], None)
        yield learner, engines
    finally:
        engines.close()
        if learner is not None:
            learner.close()


def _compare(models: Mapping[str, Path], channel: Channel, *, share: bool) -> None:
    """Greedy tokens and their logprobs by both channels, and the gate over the one under test, twice."""
    drawn = {}
    with _ends(models, share=share) as (learner, engines):
        for version, each in enumerate((Channel.SHARED_MEMORY, channel), start=1):
            engines.refit(models["old"], policy_version=0)
            before = engines.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=0)
            config = RefitConfig(channel=each, bucket_mib=0.05)
            with open_channel(config, learner, engines) as opened:
                gate = RefitGate(engines, learner, channel=opened, draft=None, trains_draft=False, config=config)
                assert gate.refit(version).num_tensors > 0
                assert gate.refit(version + 10).num_tensors > 0
            drawn[each] = engines.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=0)
            assert tokens(drawn[each]) != tokens(before)
    require_equal(drawn[channel], drawn[Channel.SHARED_MEMORY])


def test_ipc_brings_the_same_bits_on_a_gpu_that_learner_and_engine_share(
    models: dict[str, Path], ray_session: None
) -> None:
    _compare(models, Channel.IPC, share=True)


def test_nccl_brings_the_same_bits_from_one_gpu_to_another(models: dict[str, Path], ray_session: None) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL joins no two processes on one GPU: this needs two")
    _compare(models, Channel.NCCL, share=False)


def test_auto_is_ipc_where_learner_and_engine_share_a_gpu(models: dict[str, Path], ray_session: None) -> None:
    with _ends(models, share=True) as (learner, engines), open_channel(RefitConfig(), learner, engines) as channel:
        assert send(channel, 1).origin == "the ipc channel"
