"""The draft's losses: each worked by hand, and the same whether logits are held whole or a few tokens at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speculators.losses import resolve_loss_config
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.drafts.config import LOSSES
from slipstream.drafts.learner_draft import States
from slipstream.drafts.passes import ATTENTION, head_inputs, rows_of
from slipstream.drafts.trainer import DISTANCES, DraftTrainer, Judging, chunk_losses
from tests.unit.drafts.small import CHATS, CONFIG, PROMPTS


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


# The policy says (1/2, 1/4, 1/4), the draft (1/4, 1/2, 1/4): of each token the smaller chances add up to 3/4.
BY_HAND = {
    "kl_div": 0.25 * math.log(2),  # 1/2 log 2 + 1/4 log 1/2
    "tv": 0.25,
    "lk": -math.log(0.75),
    "lk_hybrid": math.exp(-2.25) * 0.25 * math.log(2) + (1 - math.exp(-2.25)) * 0.25,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_distance_is_its_formula(loss: str) -> None:
    policy = torch.tensor([[[0.5, 0.25, 0.25]]]).log()
    draft = torch.tensor([[[0.25, 0.5, 0.25]]]).log()
    assert DISTANCES[loss](draft, policy).tolist() == [[pytest.approx(BY_HAND[loss], rel=1e-5)]]
    assert DISTANCES[loss](policy, policy).tolist() == [[pytest.approx(0.0, abs=1e-6)]]


def test_every_loss_of_a_recipe_is_there() -> None:
    assert tuple(DISTANCES) == LOSSES


def test_lk_of_a_draft_that_is_never_accepted_stays_finite() -> None:
    policy, draft = torch.tensor([[[0.0, 90.0]]]), torch.tensor([[[90.0, 0.0]]])
    assert DISTANCES["lk"](draft, policy).item() == pytest.approx(-math.log(1e-5))


def _plain(trainer: DraftTrainer, states: States, loss: str, decay: float, temperature: float) -> float:
    """The loss of both chats in one row, from the logits of all passes, in numpy."""
    (row,) = rows_of(CHATS, PROMPTS, states, max_tokens=64)
    model, passes = trainer._model, CONFIG.ttt_steps
    with torch.no_grad():
        inputs = head_inputs(model, row, passes)
        drafts = [_softmax(model.lm_head(each)[0].double().numpy() / temperature) for each in inputs]
        policy = _softmax(model.verifier_lm_head(row.last)[0].double().numpy() / temperature)
    mask = row.loss_mask[0].numpy()
    total = 0.0
    for number, draft in enumerate(drafts):
        p, q = policy[number:], draft[: len(draft) - number]
        accepted = np.minimum(p, q).sum(-1)
        divergence = (p * np.log(p / q)).sum(-1)
        weight = np.exp(-3 * accepted)
        distance = {
            "kl_div": divergence,
            "tv": 1 - accepted,
            "lk": -np.log(accepted),
            "lk_hybrid": weight * divergence + (1 - weight) * (1 - accepted),
        }[loss]
        total += decay**number * distance[mask[number:]].mean()
    return total


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("decay", "temperature"), [(1.0, 1.0), (0.5, 0.7)])
def test_the_loss_of_a_step_is_the_decayed_sum_over_passes(
    policy: Path, states: States, loss: str, decay: float, temperature: float
) -> None:
    trainer = DraftTrainer(policy, replace(CONFIG, loss=loss, ttt_step_loss_decay=decay))
    expected = _plain(trainer, states, loss, decay, temperature)
    assert trainer.step(CHATS, PROMPTS, states, temperature=temperature) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("loss", ["kl_div", "tv"])
def test_passes_and_losses_are_those_of_speculators(policy: Path, states: States, loss: str) -> None:
    trainer = DraftTrainer(policy, replace(CONFIG, loss=loss))
    (row,) = rows_of(CHATS, PROMPTS, states, max_tokens=64)
    settings = trainer._model.layers[0].self_attn.config
    settings._attn_implementation, trainer._model._create_mask_fn = "sdpa", create_mask  # over the whole row
    _, expected, _ = trainer._model(
        hidden_states=row.hidden_states,
        input_ids=row.input_ids,
        document_ids=row.document_ids,
        loss_mask=row.loss_mask,
        position_ids=row.position_ids,
        verifier_last_hidden_states=row.last,
        ttt_steps=CONFIG.ttt_steps,
        loss_config=resolve_loss_config(loss, "eager"),
    )
    expected.backward()
    grads = [parameter.grad.clone() for parameter in trainer._trained]
    trainer._optimizer.zero_grad()
    settings._attn_implementation = ATTENTION
    assert float(trainer._backward(row, trainer._judging(1.0), 1.0)) == pytest.approx(expected.item(), rel=1e-6)
    for parameter, grad in zip(trainer._trained, grads, strict=True):
        assert (parameter.grad - grad).norm() <= 1e-5 * grad.norm()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk", [1, 2, 5, 18])
def test_chunks_change_neither_loss_nor_gradient_nor_acceptance(
    policy: Path, states: States, loss: str, chunk: int
) -> None:
    (row,) = rows_of(CHATS, PROMPTS, states, max_tokens=64)
    whole, parts = (DraftTrainer(policy, replace(CONFIG, loss=loss, loss_chunk_tokens=n)) for n in (1024, chunk))
    losses = [float(trainer._backward(row, trainer._judging(0.7), 1.0)) for trainer in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for one, other in zip(whole._trained, parts._trained, strict=True):
        assert (other.grad - one.grad).norm() <= 1e-6 * one.grad.norm()
    found = [trainer.evaluate(CHATS, PROMPTS, states, temperature=0.7) for trainer in (whole, parts)]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes, backward ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.num_elements = max(self.num_elements, each.numel())
        return result


@pytest.mark.parametrize("chunk", [2, 4])
def test_logits_of_more_than_a_chunk_are_never_held(policy: Path, states: States, chunk: int) -> None:
    """Of the policy's as many more as later passes look beyond it."""
    num_vocabulary = 4096
    (row,) = rows_of(CHATS, PROMPTS, states, max_tokens=64)
    model = DraftTrainer(policy, CONFIG)._model
    for name in ("lm_head", "verifier_lm_head"):
        setattr(model, name, torch.nn.Linear(2, num_vocabulary, bias=False))
    inputs = [torch.randn(1, 18, 2, requires_grad=True) for _ in range(CONFIG.ttt_steps)]
    row = replace(row, last=row.last[..., :2])
    judging = Judging(distance=DISTANCES["kl_div"], decay=1.0, temperature=0.7, chunk_tokens=chunk)
    with Largest() as largest:
        for part in chunk_losses(model, inputs, row, judging):
            part.backward()
    assert largest.num_elements == (chunk + CONFIG.ttt_steps - 1) * num_vocabulary


def test_every_loss_makes_another_draft(policy: Path, states: States) -> None:
    made = []
    for loss in LOSSES:
        trainer = DraftTrainer(policy, replace(CONFIG, loss=loss))
        trainer.step(CHATS, PROMPTS, states)
        trainer.step(CHATS, PROMPTS, states)
        made.append(trainer._model.lm_head.weight.detach())
    for index, one in enumerate(made):
        assert all(not torch.equal(one, other) for other in made[index + 1 :])


def test_a_draft_follows_the_policys_present_vocabulary(policy: Path, states: States) -> None:
    trainer = DraftTrainer(policy, CONFIG)
    model = trainer._model
    embeddings, head = model.embed_tokens.weight * 2, model.verifier_lm_head.weight * 0
    before = trainer.evaluate(CHATS, PROMPTS, states)
    trainer.follow(lambda: (embeddings, head))
    assert torch.equal(model.embed_tokens.weight, embeddings)
    assert not model.verifier_lm_head.weight.any()
    assert trainer.evaluate(CHATS, PROMPTS, states) != before


def test_what_speculators_would_compile_on_a_gpu_is_not_called(policy: Path, states: States) -> None:
    trainer = DraftTrainer(policy, CONFIG)
    trainer._model.register_forward_pre_hook(lambda *_: pytest.fail("the whole model was called"))
    trainer.step(CHATS, PROMPTS, states)
    trainer.evaluate(CHATS, PROMPTS, states)
