"""Drivers of runs on several hosts: functions that `Cluster.start` calls on the first host. They answer in JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from slipstream.config import ConfigError
from slipstream.gpu_check.check_stages import sequences_update
from slipstream.grpo.config import OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.learner.config import LearnerConfig, ParallelConfig
from slipstream.types import Dtype
from slipstream.workers.calls import LostWorkerError
from slipstream.workers.learners import RemoteLearner, start_ranks
from slipstream.workers.session import connect, on_node
from tests.conftest import _make_policy

NUM_STEPS = 16
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)


def train_through_faults(directory: str, attempts: Sequence[Sequence[str]], answer_timeout_s: float) -> Any:
    """Train on two tensor-parallel ranks, each attempt but the last until a rank is lost, each on from where it was.

    Says `training` when an attempt has done a step, and `lost` with the error that ends it.

    Args:
        directory: where policy and checkpoints lie; all hosts see it.
        attempts: the hosts of both ranks.
    Returns:
        The losses of all steps, and those of a run that nothing disturbed.
    """
    connect()
    policy, losses = _policy(directory), list[float]()
    for addresses in attempts:
        try:
            losses = _train(Path(directory) / "disturbed", policy, addresses, answer_timeout_s)
        except LostWorkerError as error:
            say("lost", str(error))
    return losses, _train(Path(directory) / "undisturbed", policy, attempts[-1], answer_timeout_s)


def _train(checkpoint: Path, policy: Path, addresses: Sequence[str], answer_timeout_s: float) -> list[float]:
    losses: list[float] = []
    with _ranks(addresses, answer_timeout_s) as learner:
        learner.load(policy, OPTIMIZER)
        if checkpoint.exists():
            losses = learner.load_checkpoint(checkpoint)["losses"]
        start = len(losses)
        for version in range(start, NUM_STEPS):
            losses.append(learner.train_step(_update(version)).stats.loss)
            learner.save_checkpoint(checkpoint, {"losses": losses})
            if version == start:
                say("training", version)
    return losses


def write_where_it_must_fail(directory: str, address: str, go_on: str) -> tuple[str, str]:
    """Write where a rank must fail: into its host's full memory, and into a directory of the driver alone.

    Says `loaded` and waits for the file `go_on` before it writes.
    """
    connect()
    policy, own = _policy(directory), Path(tempfile.mkdtemp())
    said = []
    with _ranks([address]) as learner:
        learner.load(policy, None)
        say("loaded", address)
        while not Path(go_on).exists():
            time.sleep(0.1)
        for write in (
            lambda: learner.start_publish(Path("/dev/shm"), 3)(),
            lambda: learner.save_checkpoint(own / "checkpoint", {}),
        ):
            try:
                write()
            except (OSError, ConfigError) as error:
                said.append("".join(traceback.format_exception_only(error)))
    return said[0], said[1]


def _policy(directory: str) -> Path:
    """A small policy in a directory that all hosts see."""
    return _make_policy(Path(directory) / "policy", 0, num_key_value_heads=2)


@contextmanager
def _ranks(addresses: Sequence[str], answer_timeout_s: float = 60.0) -> Iterator[RemoteLearner]:
    """A tensor-parallel learner with a rank on each of the hosts."""
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    limits = {"start_timeout_s": 90, "answer_timeout_s": answer_timeout_s, "max_tokens_per_microbatch": 64}
    parallel = ParallelConfig(tensor=len(addresses))
    config = LearnerConfig(dtype=Dtype.FLOAT32, num_threads=1, parallel=parallel, **limits)
    learner = start_ranks(config, [{"scheduling_strategy": on_node(nodes[address])} for address in addresses])
    try:
        yield learner
    finally:
        learner.close()


def say(word: str, value: Any) -> None:
    """Tell the test a word and its value."""
    sys.stdout.write(f"\n{word}: {json.dumps(value)}\n")
    sys.stdout.flush()


def _update(version: int) -> Update:
    rng = np.random.default_rng(version)
    sequences = [rng.integers(4, 64, length).tolist() for length in (7, 12, 9, 15) * 30]
    update = sequences_update(sequences, vocab_size=64, prompt_length=3)
    earlier = [np.asarray(row, dtype=np.float32) for row in update.batch.rollout_logprobs]
    return replace(update, trainer_logprobs=earlier)  # so that the loss tells policies apart
