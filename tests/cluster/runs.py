"""Drivers of runs on several hosts: functions that `Cluster.start` calls on the first host. They answer in JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray

from slipstream.config import ConfigError
from slipstream.grpo.config import LossConfig, OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.policy.config import LearnerConfig, ParallelConfig
from slipstream.types import Dtype, TrainBatch
from slipstream.workers.calls import LostWorkerError
from slipstream.workers.learners import RemoteLearner, start_ranks
from slipstream.workers.session import connect, on_node
from tests.conftest import _make_policy

NUM_STEPS = 4
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
_LENGTHS = (7, 12, 9, 15)


def train_two_steps(parallel: dict[str, int], addresses: Sequence[str]) -> dict[str, Any]:
    """Two updates of a small policy.

    Args:
        parallel: the learner's layout.
        addresses: host of each rank.
    """
    connect()
    policy = _policy()
    with _ranks(parallel, addresses) as learner:
        learner.load(policy, OPTIMIZER)
        stats = [learner.train_step(_update(version)).stats for version in range(2)]
        return {
            "hosts": [rank.host for rank in learner.ranks],
            "losses": [each.loss for each in stats],
            "grad_norms": [each.grad_norm for each in stats],
        }


def train_through_a_fault(
    directory: str, addresses: Sequence[str], later: Sequence[str], answer_timeout_s: float
) -> dict[str, Any]:
    """Train until a rank is lost, then from the last checkpoint on, to the end.

    Says `training` when the first step is done, and `lost` with the error.

    Args:
        directory: where checkpoints lie; all hosts see it.
        addresses: host of each tensor-parallel rank; `later`: after the loss.
    """
    connect()
    policy, checkpoint = _policy(), Path(directory) / "checkpoint"
    losses: list[float] = []
    for places in (addresses, later):
        try:
            with _ranks({"tensor": 2}, places, answer_timeout_s) as learner:
                learner.load(policy, OPTIMIZER)
                if checkpoint.exists():
                    losses = learner.load_checkpoint(checkpoint)["losses"]
                for version in range(len(losses), NUM_STEPS):
                    losses.append(learner.train_step(_update(version, num_copies=100)).stats.loss)
                    learner.save_checkpoint(checkpoint, {"losses": losses})
                    if version == 0:
                        _say("training", places)
            break
        except LostWorkerError as error:
            _say("lost", str(error))
    return {"losses": losses, "hosts": list(places)}


def publish(address: str) -> str:
    """How a rank on that host fares that writes its weights into its host's memory."""
    connect()
    policy = _policy()
    with _ranks({}, [address]) as learner:
        learner.load(policy, None)
        try:
            learner.publish(Path("/dev/shm"), 3)
        except OSError as error:
            return "".join(traceback.format_exception_only(error))
    return "nothing went wrong"


def save_where_others_cannot_see(address: str) -> str:
    """What a rank on another host says to a directory of the driver's own."""
    connect()
    policy = _policy()
    with _ranks({}, [address]) as learner:
        learner.load(policy, None)
        try:
            learner.save_checkpoint(policy.parent / "checkpoint", {})
        except ConfigError as error:
            return str(error)
    return "nothing went wrong"


def _policy() -> Path:
    """A small policy in a directory that the driver's host alone has."""
    return _make_policy(Path(tempfile.mkdtemp()) / "policy", 0, num_key_value_heads=2)


@contextmanager
def _ranks(
    parallel: dict[str, int], addresses: Sequence[str], answer_timeout_s: float = 60.0
) -> Iterator[RemoteLearner]:
    """A learner whose ranks are on these hosts."""
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    config = LearnerConfig(
        dtype=Dtype.FLOAT32,
        num_threads=1,
        max_tokens_per_microbatch=64,
        parallel=ParallelConfig(**parallel),
        start_timeout_s=90,
        answer_timeout_s=answer_timeout_s,
    )
    learner = start_ranks(config, [{"scheduling_strategy": on_node(nodes[address])} for address in addresses])
    try:
        yield learner
    finally:
        learner.close()


def _say(word: str, value: Any) -> None:
    sys.stdout.write(f"\n{word}: {json.dumps(value)}\n")
    sys.stdout.flush()


def _update(version: int, *, num_copies: int = 1) -> Update:
    rng = np.random.default_rng(version)
    lengths = _LENGTHS * num_copies
    sequences = tuple(tuple(rng.integers(4, 64, length).tolist()) for length in lengths)
    logprobs = [-rng.random(length - 3, dtype=np.float32) for length in lengths]
    batch = TrainBatch(
        token_ids=sequences,
        prompt_lengths=(3,) * len(sequences),
        rollout_logprobs=tuple(tuple(row.tolist()) for row in logprobs),
        advantages=tuple(rng.normal(size=len(sequences)).tolist()),
        policy_version=version,
    )
    return Update(batch=batch, trainer_logprobs=logprobs, ref_logprobs=None, loss=LossConfig(), temperature=1.0)
