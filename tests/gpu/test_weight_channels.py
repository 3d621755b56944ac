"""The channel that `auto` takes on a GPU; stages 4 and 10 of gpu-check show that IPC and NCCL bring the right bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.refit.channel import open_channel, send
from slipstream.refit.config import RefitConfig
from tests.gpu.ends import learner_and_engine

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_auto_is_ipc_where_learner_and_engine_share_a_gpu(models: dict[str, Path], ray_session: None) -> None:
    with learner_and_engine(models) as (learner, engines):
        learner.load(models["new"], None)
        with open_channel(RefitConfig(), learner, engines) as channel:
            assert send(channel, 1).origin == "the ipc channel"
