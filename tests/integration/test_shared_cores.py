"""Beside each other, engine and learner compute on a part of the cores each, and so does an engine that comes later."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from slipstream.engine.config import SamplingConfig
from slipstream.learner.config import LearnerConfig
from slipstream.workers import cores
from slipstream.workers.cores import shared_cores
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import start_learner
from slipstream.workers.session import own_node
from tests.small import ENGINE, prompts

pytestmark = pytest.mark.slow


def test_engine_and_learner_share_the_cores_in_the_block_and_an_engine_that_replaces_another_too(
    policy: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: 2)
    config = LearnerConfig(num_threads=2, max_tokens_per_microbatch=1024)
    with start_engine(policy, config=replace(ENGINE, num_threads=2)) as engine, start_learner(config) as learner:
        learner.load(policy, None)
        assert threads(engine, learner) == [2, 2]
        with shared_cores(own_node(), engine, learner):
            assert threads(engine, learner) == [1, 1]
            restart(engine)
            sampling = SamplingConfig(temperature=1.0, max_response_tokens=8)
            engine.generate(prompts([range(2, 10)]), sampling=sampling, group_size=1, seed=1)
            assert threads(engine) == [1]
        assert threads(engine, learner) == [2, 2]
        with pytest.raises(RuntimeError, match="the learner died"), shared_cores(own_node(), engine):
            raise RuntimeError("the learner died")
        restart(engine)
        assert threads(engine) == [2]


def threads(*parties: Any) -> list[int]:
    """Numbers of threads with which workers compute now."""
    calls = [
        each.actor.__ray_call__.remote(lambda _: torch.get_num_threads()) for party in parties for each in party.workers
    ]
    return ray.get(calls)


def restart(engine: Any) -> None:
    (lost,) = engine.workers
    ray.kill(lost.actor)
    deadline_s = time.monotonic() + 60.0
    while not engine.lost_workers() and time.monotonic() < deadline_s:
        time.sleep(0.05)  # Ray kills in the background
    assert engine.lost_workers() == [lost]
    engine.replace([lost])
