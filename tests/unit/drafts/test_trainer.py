"""Training of a draft: alignment, losses and held-out acceptance worked by hand, and exact resume."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.drafts.config import DraftOnline
from slipstream.drafts.learner_draft import States
from slipstream.drafts.passes import pack_chats
from slipstream.drafts.trainer import DraftOptimizer, DraftTrainer
from slipstream.grpo.config import OptimizerMethod
from slipstream.learner.checkpoint import CheckpointError
from slipstream.ragged import Ragged
from tests.unit.drafts.small import CHATS, CONFIG, PROMPTS

ONLINE = replace(CONFIG, online=DraftOnline.ALWAYS, online_learning_rate=1e-2)


def test_chats_are_shifted_within_themselves() -> None:
    def one(offset: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        aux = torch.arange(offset, offset + length).float()[:, None]
        return aux, aux + 100

    packed = pack_chats([[10, 11, 12, 13], [20, 21, 22]], [1, 1], [one(0, 4), one(50, 3)])
    assert packed.input_ids.tolist() == [[11, 12, 13, 21, 22]]
    assert packed.hidden_states[0, :, 0].tolist() == [0, 1, 2, 50, 51]
    assert packed.last[0, :, 0].tolist() == [101, 102, 103, 151, 152]
    assert packed.position_ids.tolist() == [[1, 2, 3, 1, 2]]
    assert packed.document_ids.tolist() == [[0, 0, 0, 1, 1]]
    # The state of a chat's last token predicts a token that was never sampled.
    assert packed.loss_mask.tolist() == [[True, True, False, True, False]]


def test_what_the_draft_learns_from_is_the_policys_own_distribution(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    from transformers import Qwen3ForCausalLM

    head = DraftTrainer(policy, CONFIG)._model
    logits = Qwen3ForCausalLM.from_pretrained(policy)(torch.tensor([CHATS[0]])).logits[0]
    torch.testing.assert_close(head.verifier_lm_head(head.verifier_norm(states[0][1])), logits)


def test_training_lowers_the_loss_and_raises_held_out_acceptance(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    trainer = DraftTrainer(policy, CONFIG)
    _, before = trainer.evaluate(CHATS, PROMPTS, states)
    losses = [trainer.step(CHATS, PROMPTS, states) for _ in range(30)]
    rates, after = trainer.evaluate(CHATS, PROMPTS, states)
    assert losses[-1] < 0.5 * losses[0]
    assert 1.0 <= before < after <= 1.0 + CONFIG.ttt_steps
    assert len(rates) == CONFIG.ttt_steps


def test_rows_do_not_change_the_loss(policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    from dataclasses import replace

    together = DraftTrainer(policy, CONFIG).step(CHATS, PROMPTS, states)
    apart = DraftTrainer(policy, replace(CONFIG, tokens_per_row=12)).step(CHATS, PROMPTS, states)
    assert apart == pytest.approx(together, rel=0.05)


def test_a_resumed_draft_training_equals_an_uninterrupted_one(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]], tmp_path: Path
) -> None:
    whole = DraftTrainer(policy, CONFIG)
    losses = [whole.step(CHATS, PROMPTS, states) for _ in range(6)]
    killed = DraftTrainer(policy, CONFIG)
    for _ in range(3):
        killed.step(CHATS, PROMPTS, states)
    killed.save_checkpoint(tmp_path / "checkpoint")
    resumed = DraftTrainer(policy, CONFIG)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert [resumed.step(CHATS, PROMPTS, states) for _ in range(3)] == losses[3:]


def test_a_damaged_checkpoint_of_a_draft_is_refused(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]], tmp_path: Path
) -> None:
    trainer = DraftTrainer(policy, CONFIG)
    trainer.step(CHATS, PROMPTS, states)
    trainer.save_checkpoint(tmp_path / "draft" / "step-1")
    file = tmp_path / "draft" / "step-1" / "draft.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"step-1 is damaged: .*; remove {tmp_path / 'draft'} to train"):
        trainer.load_checkpoint(tmp_path / "draft" / "step-1")


def test_two_trainers_with_a_chat_each_make_the_update_of_one_with_both(
    policy: Path, states: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    config = replace(CONFIG, tokens_per_row=12)  # each chat has a row of its own, here as there
    trainers = [DraftTrainer(policy, config) for _ in range(3)]
    for trainer in trainers[1:]:
        trainer._model.load_state_dict(trainers[0]._model.state_dict())
    handed: list[torch.Tensor] = [torch.empty(0)] * 2
    meeting = Barrier(2)

    def sum_over_ranks(rank: int, tensor: torch.Tensor) -> torch.Tensor:
        handed[rank] = tensor
        meeting.wait(60)
        total = handed[0] + handed[1]
        meeting.wait(60)
        return total

    def steps(rank: int) -> list[float]:
        own, reduce = slice(rank, rank + 1), partial(sum_over_ranks, rank)
        trainers[1 + rank]._sum_over_ranks = reduce
        return [trainers[1 + rank].step(CHATS[own], PROMPTS[own], states[own]) for _ in range(2)]

    expected = [trainers[0].step(CHATS, PROMPTS, states) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        losses = list(pool.map(steps, (0, 1)))
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    one, *others = ([p.detach() for p in trainer._trained] for trainer in trainers)
    for other in others:
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-5)


def test_hidden_states_captured_once_train_the_draft_as_those_of_each_step_do(policy: Path) -> None:
    from slipstream.learner.config import LearnerConfig
    from slipstream.workers.learner_process import LearnerProcess

    losses = []
    for gib in (1.0, 0.0):
        config = replace(CONFIG, states_cache_gib=gib)
        learner = LearnerProcess(LearnerConfig(max_tokens_per_microbatch=16))
        learner.load(policy, None)
        learner.start_draft(policy, config)
        chats = Ragged.of(CHATS, np.int32)
        assert learner.hold_draft_chats((range(2), chats, PROMPTS), config) is (gib > 0.0)
        losses.append([learner.draft_step(indices, config, 1.0) for indices in ([0, 1], [1], [0])])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


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


ONE_PASS = replace(CONFIG, ttt_steps=1)


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _probabilities(policy: Path, states: States, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """What policy and fresh draft say of the response tokens of the first chat but the first, [N, V] each."""
    model = DraftTrainer(policy, ONE_PASS)._model
    settings: Any = model.layers[0].self_attn.config
    settings._attn_implementation = "sdpa"  # which takes the mask that its own forward pass makes
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    aux, last = states[0]
    num = len(CHATS[0]) - 1
    with torch.no_grad():
        model(
            hidden_states=aux[None, :-1],
            input_ids=torch.tensor([CHATS[0][1:]]),
            document_ids=torch.zeros(1, num, dtype=torch.long),
            position_ids=torch.arange(1, num + 1)[None],
            ttt_steps=1,
        )
        policy_logits = model.verifier_lm_head(last[1:])
    responses = slice(PROMPTS[0] - 1, num - 1)  # states of token i say what follows it
    draft_logits = seen[0][0]
    return (
        _softmax(policy_logits[responses].numpy() / temperature),
        _softmax(draft_logits[responses].numpy() / temperature),
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_the_loss_is_the_divergence_at_the_temperature(policy: Path, states: States, temperature: float) -> None:
    p, q = _probabilities(policy, states, temperature)
    expected = (p * (np.log(p) - np.log(q))).sum(-1).mean()
    trainer = DraftTrainer(policy, ONE_PASS)
    assert trainer.step(CHATS[:1], PROMPTS[:1], states[:1], temperature=temperature) == pytest.approx(
        expected, rel=1e-4
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_held_out_acceptance_is_the_overlap_at_the_temperature(
    policy: Path, states: States, temperature: float
) -> None:
    p, q = _probabilities(policy, states, temperature)
    (rate,), length = DraftTrainer(policy, ONE_PASS).evaluate(
        CHATS[:1], PROMPTS[:1], states[:1], temperature=temperature
    )
    assert rate == pytest.approx(np.minimum(p, q).sum(-1).mean(), rel=1e-5)
    assert length == pytest.approx(1.0 + rate, rel=1e-6)
