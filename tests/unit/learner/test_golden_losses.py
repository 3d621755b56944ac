"""A fixed-seed training run of the real learner, whose losses move only when someone means them to.

Six pretraining steps, then three GRPO steps of two updates each. The values are those of torch 2.13 with AVX-512; on
another processor, whose kernels sum in another order, they agree to some 1e-5.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.grpo.config import LossConfig, OptimizerConfig
from slipstream.grpo.update import Update
from slipstream.types import TrainBatch
from tests.unit.learner.policies import new_policy, shaped

SCRATCH = replace(
    shaped(num_layers=4, num_attention_heads=4, num_query_groups=2),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=2),
    num_steps=8,
)
LOSS = LossConfig(kl_coefficient=0.05, truncated_importance_sampling=1.02)
PRETRAINING = (3.468036651611328, 3.0653361082, 2.6880948544, 2.4283983707, 2.2338878512, 2.0897256136)
UPDATES = (  # loss, norm of the gradient, KL to the step's start, clipped share of the tokens
    (0.1138268933, 0.3909251395, 0.0, 0.0),
    (0.0964227244, 0.4987986109, 0.0025976425, 1 / 167),
    (0.1138268933, 0.8965118005, 0.0, 0.0),
    (0.1059260145, 0.7716883909, 0.3375779983, 83 / 167),
    (0.1138268933, 1.8936442078, 0.0, 0.0),
    (0.0475324765, 0.9776046380, 0.1068848514, 85 / 167),
)
SUM_OF_WEIGHTS = 434.4866605073


def test_the_losses_of_a_fixed_run_are_what_they_were() -> None:
    policy = new_policy(SCRATCH, optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=2))
    rng = np.random.default_rng(7)
    places = zip(rng.integers(8, 24, 12), rng.integers(0, 29, 12), strict=True)
    sequences = tuple(tuple(((np.arange(size) * 3 + offset) % 29 + 2).tolist()) for size, offset in places)
    losses = [policy.lm_step(sequences, [2] * 12) for _ in range(6)]
    updates = []
    for step in range(3):
        logprobs = policy.logprobs(sequences, [3] * 12, 0.8)
        batch = TrainBatch(
            token_ids=sequences,
            prompt_lengths=(3,) * 12,
            rollout_logprobs=tuple(tuple(float(value) - 0.05 for value in row) for row in logprobs),
            advantages=tuple(float(value) for value in np.linspace(-1, 1, 12)),
            policy_version=step,
        )
        update = Update(batch=batch, trainer_logprobs=logprobs, ref_logprobs=logprobs, loss=LOSS, temperature=0.8)
        for _ in range(2):
            stats = policy.train_step(update).stats
            updates.append((stats.loss, stats.grad_norm, stats.kl, stats.clip_fraction))
    assert losses == pytest.approx(PRETRAINING, rel=2e-4)
    for found, expected in zip(updates, UPDATES, strict=True):
        assert found == pytest.approx(expected, rel=5e-4, abs=1e-6)
    total = sum(float(tensor.double().sum()) for _, tensor in policy.weights())
    assert total == pytest.approx(SUM_OF_WEIGHTS, rel=1e-5)
