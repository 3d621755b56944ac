"""The draft learns the distributions that are sampled: softmax(logits / temperature) of policy and draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.drafts.learner_draft import States
from slipstream.drafts.trainer import DraftTrainer
from tests.unit.drafts.small import CHATS, CONFIG, PROMPTS

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
