"""Which parameters of a draft Muon takes, and that a resumed draft goes on as it would have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.drafts.config import DraftOnline
from slipstream.drafts.learner_draft import States
from slipstream.drafts.trainer import DraftOptimizer, DraftTrainer
from slipstream.grpo.config import OptimizerMethod
from tests.unit.drafts.small import CHATS, CONFIG, PROMPTS

ONLINE = replace(CONFIG, online=DraftOnline.ALWAYS, online_learning_rate=1e-2)


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (name, torch.nn.Parameter(torch.eye(2)[:rows].squeeze(0)))
        for name, rows in (("fc.weight", 2), ("norm.weight", 1), ("lm_head.weight", 2))
    ]


def test_muon_takes_the_matrices_but_the_output_head() -> None:
    named = parameters()
    optimizer = DraftOptimizer(named, OptimizerMethod.MUON)
    assert optimizer.moments() == {}
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(learning_rate=0.1)
    adamw = [f"{index}.{name}" for index in (1, 2) for name in ("exp_avg", "exp_avg_sq")]
    assert list(optimizer.moments()) == ["0.momentum_buffer", *adamw]
    assert optimizer.learning_rate == 0.1
    optimizer.zero_grad()
    assert all(parameter.grad is None for _, parameter in named)


def test_adamw_takes_every_parameter_and_moves_it_by_the_learning_rate_at_first() -> None:
    named = parameters()
    optimizer = DraftOptimizer(named, OptimizerMethod.ADAMW)
    for _, parameter in named:
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step(learning_rate=0.1)
    assert len(optimizer.moments()) == 6
    torch.testing.assert_close(named[0][1].detach(), torch.eye(2) - 0.1)


@pytest.mark.parametrize("method", OptimizerMethod)
def test_a_draft_that_resumes_goes_on_bit_for_bit(
    policy: Path, draft: Path, states: States, method: OptimizerMethod
) -> None:
    config = replace(ONLINE, online_optimizer=method)
    whole, resumed = (DraftTrainer(policy, config, given=draft, is_online=True) for _ in range(2))
    for _ in range(3):
        whole.learn(CHATS, PROMPTS, states, temperature=1.0)
    resumed.restore({name: tensor.clone() for name, tensor in whole.state().items()})
    for trainer in (whole, resumed):
        trainer.learn(CHATS, PROMPTS, states, temperature=1.0)
    assert all(torch.equal(tensor, resumed.state()[name]) for name, tensor in whole.state().items())


def test_online_passes_are_those_of_pretraining_unless_they_are_given(
    policy: Path, draft: Path, states: States
) -> None:
    losses = {
        passes: DraftTrainer(policy, replace(ONLINE, online_ttt_steps=passes), given=draft, is_online=True).learn(
            CHATS, PROMPTS, states, temperature=1.0
        )
        for passes in (None, 3, 1)
    }
    assert losses[None] == losses[3] > losses[1] > 0.0  # the loss is the sum over passes
