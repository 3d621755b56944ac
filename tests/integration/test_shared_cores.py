"""The number of threads changes how long engine and learner take, and nothing that they compute."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from slipstream.engine.config import SamplingConfig
from slipstream.grpo.config import LossConfig, OptimizerConfig, OptimizerMethod
from slipstream.grpo.update import Update
from slipstream.learner.config import LearnerConfig
from slipstream.train.batch import assemble
from slipstream.types import Dtype
from slipstream.workers.cores import CoreSlot, shared_cores, write_shared
from slipstream.workers.engines import start_engine
from slipstream.workers.learners import start_learner
from slipstream.workers.session import own_node
from tests.small import ENGINE, prompts
from tests.unit.train.world import CONFIG

pytestmark = pytest.mark.slow

SAMPLING = SamplingConfig(temperature=1.0, max_response_tokens=40)
PROMPTS = prompts(range(2, 10 + 3 * i) for i in range(4))
DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, policy: Path, ray_session: None) -> Iterator[Any]:
    with start_engine(policy, config=replace(ENGINE, dtype=request.param, num_threads=2)) as started:
        yield started


@pytest.mark.parametrize(("engine", "dtype"), [(dtype, dtype) for dtype in DTYPES], indirect=["engine"])
def test_rollouts_and_updates_are_the_same_bits_on_one_thread_and_on_two(
    engine: Any, dtype: Dtype, policy: Path, tmp_path: Path
) -> None:
    path = tmp_path / "at_work"
    write_shared(path, 3)
    found = []
    with start_learner(LearnerConfig(dtype=dtype, num_threads=2, max_tokens_per_microbatch=1024)) as learner:
        for third_works in (False, True):  # who leaves them all threads, or one each
            learner.load(policy, OptimizerConfig(method=OptimizerMethod.MUON, learning_rate=1e-2))
            engine.share_cores([CoreSlot(path, 0)])
            learner.share_cores([CoreSlot(path, 1)])
            _say(path, 2, is_at_work=third_works)
            groups = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1).groups
            trained = found[0][0] if found else groups  # the same batch, whatever the engine made of its threads
            rewards = [float(i % 3) for i in range(16)]
            batch = assemble(trained, rewards, config=CONFIG, policy_version=0, draft_version=None)
            update = Update(batch=batch, trainer_logprobs=None, ref_logprobs=None, loss=LossConfig(), temperature=1.0)
            learner.train_step(update)
            learner.save_hf(tmp_path / f"trained_{third_works}", policy)
            found.append((groups, (tmp_path / f"trained_{third_works}" / "model.safetensors").read_bytes()))
            engine.share_cores([None])
            learner.share_cores([None])
    assert found[0] == found[1]


@pytest.mark.parametrize("engine", DTYPES[:1], indirect=True)
def test_an_engine_in_the_place_of_a_lost_one_takes_back_that_it_was_at_work_where_cores_are_shared(
    engine: Any, tmp_path: Path
) -> None:
    path = tmp_path / "at_work"
    write_shared(path, 1)
    engine.share_cores([CoreSlot(path, 0)])
    (lost,) = engine.workers
    ray.kill(lost.actor)
    _say(path, 0, is_at_work=True)  # as of one that died in a generation
    engine.replace([lost])
    engine.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=1)
    assert path.read_bytes() == b"\0"

    with pytest.raises(RuntimeError, match="the learner died"), shared_cores(own_node(), engine):
        raise RuntimeError("the learner died")
    (lost,) = engine.workers
    assert engine.lost_workers() == []
    ray.kill(lost.actor)
    deadline_s = time.monotonic() + 60.0
    while not engine.lost_workers() and time.monotonic() < deadline_s:
        time.sleep(0.05)  # Ray kills in the background
    assert engine.lost_workers() == [lost]
    engine.replace([lost])  # the shared cores are gone, with their file
    engine.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=1)


def _say(path: Path, index: int, *, is_at_work: bool) -> None:
    with path.open("r+b") as file:
        file.seek(index)
        file.write(bytes([is_at_work]))
