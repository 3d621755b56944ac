"""Drivers of runs on several hosts: functions that `Cluster.start` calls on the first host. They answer in JSON."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from slipstream.grpo.config import LossConfig, OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.policy.config import LearnerConfig, ParallelConfig
from slipstream.types import Dtype, TrainBatch
from slipstream.workers.learners import start_ranks
from slipstream.workers.session import connect, on_node
from tests.conftest import _make_policy

_LENGTHS = (7, 12, 9, 15)


def train_two_steps(parallel: dict[str, int], addresses: Sequence[str]) -> dict[str, Any]:
    """Two updates of a small policy.

    Args:
        parallel: the learner's layout.
        addresses: host of each rank.
    """
    connect()
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    config = LearnerConfig(
        dtype=Dtype.FLOAT32,
        num_threads=1,
        max_tokens_per_microbatch=64,
        parallel=ParallelConfig(**parallel),
        start_timeout_s=60,
        answer_timeout_s=60,
    )
    policy = _make_policy(Path(tempfile.mkdtemp()) / "policy", 0, num_key_value_heads=2)
    learner = start_ranks(config, [{"scheduling_strategy": on_node(nodes[address])} for address in addresses])
    try:
        learner.load(policy, OptimizerConfig(learning_rate=1e-3))
        stats = [learner.train_step(_update(version)) for version in range(2)]
        return {
            "hosts": [rank.host for rank in learner.ranks],
            "losses": [each.loss for each in stats],
            "grad_norms": [each.grad_norm for each in stats],
        }
    finally:
        learner.close()


def _update(version: int) -> Update:
    rng = np.random.default_rng(version)
    sequences = tuple(tuple(rng.integers(4, 64, length).tolist()) for length in _LENGTHS)
    logprobs = [-rng.random(length - 3, dtype=np.float32) for length in _LENGTHS]
    batch = TrainBatch(
        token_ids=sequences,
        prompt_lengths=(3,) * len(sequences),
        rollout_logprobs=tuple(tuple(row.tolist()) for row in logprobs),
        advantages=tuple(rng.normal(size=len(sequences)).tolist()),
        policy_version=version,
    )
    return Update(batch=batch, trainer_logprobs=logprobs, ref_logprobs=None, loss=LossConfig(), temperature=1.0)
