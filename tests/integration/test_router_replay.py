"""A mixture's learner sends tokens to the experts that other routers chose, as transformers does when it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.grpo.config import LossConfig
from slipstream.grpo.update import Update, part_of
from slipstream.learner.config import LearnerConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.packing import plan_shards
from slipstream.types import TrainBatch
from slipstream.workers.learner_process import LearnerProcess
from tests.forked.ranks import learner_of, on_ranks_of
from tests.integration import qwen3_moe
from tests.integration.test_experts import LEARNERS, ONE, OPTIMIZER, require_gradients

BATCH = qwen3_moe.sequences()
STARTS = [1] * len(BATCH)


def other_routes(path: Path) -> list[np.ndarray]:
    """Experts that routers choose whose weights are a little different, as an engine's rounding makes them."""
    model = qwen3_moe.load(path)
    torch.manual_seed(1)
    with torch.no_grad():
        for router in filter(None, qwen3_moe.routers(model)):
            router.weight += 0.05 * torch.randn_like(router.weight)
    return [qwen3_moe.routed(model, tokens)[1] for tokens in BATCH]


def update_of(routes: list[np.ndarray]) -> Update:
    """An update whose gradient is that of the mean next-token loss."""
    how = {"token_ids": BATCH, "prompt_lengths": STARTS, "routes": routes, "policy_version": 0}
    logprobs = [[0.0] * (len(tokens) - 1) for tokens in BATCH]
    batch = TrainBatch(rollout_logprobs=logprobs, advantages=[1.0] * len(BATCH), **how)
    return Update(batch=batch, trainer_logprobs=None, ref_logprobs=None, loss=LossConfig(), temperature=1.0)


def run_rank(rank: int, learner: LearnerConfig, model: Path, path: Path, routes: list[np.ndarray]) -> Any:
    """This rank's logprobs by the given routes, by its own routers, and in an update by the given routes again."""
    policy = MegatronPolicy.load(model, learner=learner, optimizer=OPTIMIZER)
    mine = plan_shards([len(tokens) for tokens in BATCH], learner.parallel.data)[learner.parallel.data_rank(rank)]
    part = part_of(update_of(routes), mine)
    starts = part.batch.prompt_lengths
    before = policy.logprobs(part.batch.token_ids, starts, 1.0, routes=part.batch.routes)
    own = policy.logprobs(part.batch.token_ids, starts, 1.0)
    trained = policy.train_step(part)
    policy.save_checkpoint(path, {})
    policy.finish_checkpoint()
    return {"mine": mine, "before": before, "own": own, "during": trained.own_logprobs}


def require_replayed(got: list[Any], model: Path, routes: list[np.ndarray], path: Path) -> None:
    """Logprobs and gradients are transformers' with the same experts; without routes those of the routers' own."""
    mixture, largest = qwen3_moe.load(model), 0.0
    for rank in got:
        for place, index in enumerate(rank["mine"]):
            told = qwen3_moe.routed(mixture, BATCH[index], routes[index])[0].detach().numpy()
            own = qwen3_moe.routed(mixture, BATCH[index])[0].detach().numpy()
            for row in (rank["before"][place], rank["during"][place]):
                np.testing.assert_allclose(row, told, rtol=0, atol=1e-5)
            np.testing.assert_allclose(rank["own"][place], own, rtol=0, atol=1e-5)
            largest = max(largest, float(np.abs(told - own).max()))
    assert largest > 0.01, "the routes must be others than the learner's own"
    require_gradients(path, qwen3_moe.gradients(model, BATCH, routes)[1])


@pytest.mark.parametrize("normalizes", [True, False], ids=["chosen experts sum to 1", "shares of all experts"])
def test_tokens_go_where_they_are_sent_and_routers_still_learn(normalizes: bool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    qwen3_moe.write_model(model, seed=0, normalizes=normalizes)
    routes = other_routes(model)
    got = run_rank(0, ONE, model, tmp_path / "checkpoint", routes)
    require_replayed([got], model, routes, tmp_path / "checkpoint")
    process = LearnerProcess(ONE)
    process.load(model, None)
    for row, own in zip(process.logprobs(update_of(routes).batch, 1.0), got["before"], strict=True):
        np.testing.assert_array_equal(row, own)
    with pytest.raises(ValueError, match=r"routes of sequence 0 must have the shape \(30, 3, 2\), got \(29, 3, 2\)"):
        process.logprobs(update_of([routes[0][1:], *routes[1:]]).batch, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "data"])
def test_tokens_go_where_they_are_sent_on_several_ranks(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    qwen3_moe.write_model(model, seed=0)
    routes = other_routes(model)
    got = on_ranks_of(learner_of(name, ONE), run_rank, model, tmp_path / "checkpoint", routes)
    if name == "three stages":
        got = got[-1:]  # the stage that has the logits
    require_replayed(got, model, routes, tmp_path / "checkpoint")
