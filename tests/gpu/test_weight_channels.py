"""The channels between GPUs, on real ones: what arrives is what shared memory brings, to the last bit.

CUDA IPC runs on any one GPU, which learner and engine share; NCCL needs two. Not run so far: no GPU was at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from slipstream.refit.channel import open_channel, send
from slipstream.refit.config import Channel, RefitConfig
from slipstream.refit.gate import RefitGate
from tests.gpu.ends import SAMPLING, learner_and_engine
from tests.small import PROMPTS, require_equal, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def _compare(models: Mapping[str, Path], channel: Channel, *, share: bool) -> None:
    """Greedy tokens and their logprobs by both channels, and the gate over the one under test, twice."""
    drawn = {}
    with learner_and_engine(models, part=0.5 if share else 1.0) as (learner, engines):
        learner.load(models["new"], None)
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
    with learner_and_engine(models) as (learner, engines):
        learner.load(models["new"], None)
        with open_channel(RefitConfig(), learner, engines) as channel:
            assert send(channel, 1).origin == "the ipc channel"
