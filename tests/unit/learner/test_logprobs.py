"""Log-probabilities and entropies in chunks of tokens, against all logits at once; conditionals by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from slipstream.grpo.config import OptimizerConfig
from slipstream.learner import logprobs
from slipstream.learner.batches import Batching, MicroBatch
from slipstream.learner.logprobs import OutputHead, conditionals, output_weight, processed_logprobs
from slipstream.learner.megatron import MegatronPolicy
from tests.unit.learner.policies import VOCAB, new_policy, shaped, update_of

SEQUENCES = tuple(tuple(np.random.default_rng(i).integers(0, VOCAB, 5 + 3 * (i % 7)).tolist()) for i in range(9))


def _policy(*, tied: bool = False, **learner: Any) -> MegatronPolicy:
    scratch = shaped(num_layers=2, tie_word_embeddings=tied)
    return new_policy(scratch, optimizer=OptimizerConfig(learning_rate=1e-3, clip_grad=0.5), **learner)


def _head(chunk_tokens: int | None, weight_VH: torch.Tensor) -> OutputHead:
    """An output layer of this weight alone."""
    policy = _policy()
    layer = policy._gpt.output_layer
    layer.weight = torch.nn.Parameter(weight_VH)
    layer.output_size_per_partition, layer.input_size = weight_VH.shape
    return OutputHead(policy._gpt, chunk_tokens=chunk_tokens, adds_to_main_grad=False)


def _batch(labels_BT: torch.Tensor, mask_BT: torch.Tensor) -> MicroBatch:
    return MicroBatch(
        indices=tuple(range(len(labels_BT))),
        inputs=Batching(max_tokens=labels_BT.numel()).inputs(labels_BT.tolist(), labels_BT.device),
        labels_BT=labels_BT,
        mask_BT=mask_BT,
    )


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000, None])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_values_and_gradients_are_those_of_all_logits_in_float64(chunk_tokens: int | None, temperature: float) -> None:
    torch.manual_seed(0)
    hidden_TBH, weight_VH = torch.randn(11, 3, 16), torch.randn(40, 16)
    mask_BT, labels_BT = torch.rand(3, 11) < 0.6, torch.randint(0, 40, (3, 11))
    upstream_BT = torch.randn(3, 11)
    exact = [each.double().requires_grad_() for each in (hidden_TBH, weight_VH)]
    logprobs_BTV = torch.log_softmax((exact[0] @ exact[1].t()).transpose(0, 1) / temperature, -1)
    logprobs_BT = logprobs_BTV.gather(-1, labels_BT[..., None])[..., 0]
    torch.where(mask_BT, logprobs_BT * upstream_BT, 0.0).sum().backward()

    head = _head(chunk_tokens, weight_VH.clone())
    leaf = hidden_TBH.clone().requires_grad_()
    scores = head.scores(leaf, _batch(labels_BT, mask_BT), temperature)
    (torch.where(mask_BT, scores.logprobs_BT, 0.0) * upstream_BT).sum().backward()

    torch.testing.assert_close(scores.logprobs_BT[mask_BT], logprobs_BT[mask_BT].float(), rtol=1e-6, atol=3e-6)
    entropy = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)[mask_BT].sum()
    assert float(scores.entropy) == pytest.approx(float(entropy), rel=1e-6)
    for found, each in zip((leaf.grad, output_weight(head._gpt).grad), exact, strict=True):
        assert found is not None and each.grad is not None
        torch.testing.assert_close(found.double(), each.grad, rtol=1e-6, atol=1e-5 * float(each.grad.abs().max()))


def test_no_more_logits_are_held_than_those_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    genuine = logprobs._Head.logits

    def noted(self: logprobs._Head, hidden_CH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden_CH))
        return genuine(self, hidden_CH, weight_VH)

    monkeypatch.setattr(logprobs._Head, "logits", noted)
    hidden_TBH = torch.randn(5, 4, 16, requires_grad=True)
    mask_BT = torch.ones(4, 5, dtype=torch.bool)
    mask_BT[0] = False  # what does not count is not computed
    scores = _head(6, torch.randn(8, 16)).scores(hidden_TBH, _batch(torch.zeros(4, 5, dtype=torch.long), mask_BT), 1.0)
    scores.logprobs_BT.sum().backward()
    assert seen == [6, 6, 3, 6, 6, 3]


@pytest.mark.parametrize("tied", [False, True])
def test_an_update_in_chunks_is_that_of_all_logits_at_once(tied: bool) -> None:
    def outcome(chunk_tokens: int | None) -> tuple[Any, ...]:
        policy = _policy(tied=tied, logprob_chunk_tokens=chunk_tokens)
        update = update_of(policy, SEQUENCES, start=2, advantages=np.linspace(-1.0, 1.0, 9).tolist())
        stats = [dataclasses.asdict(policy.train_step(update).stats) for _ in range(2)]
        loss = policy.lm_step(SEQUENCES, [2] * 9)
        return update.trainer_logprobs, stats, loss, policy.logprobs(SEQUENCES, [2] * 9, 0.8)

    (before, stats, loss, after), found = outcome(None), outcome(7)
    np.testing.assert_allclose(np.concatenate(found[0]), np.concatenate(before), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(found[3]), np.concatenate(after), rtol=0, atol=2e-5)  # after 3 of AdamW
    assert found[1] == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in stats]
    assert found[2] == pytest.approx(loss, rel=1e-5)
    assert stats[0]["clip_fraction"] == 0.0
    assert stats[0]["entropy"] == pytest.approx(math.log(VOCAB), abs=0.1)  # of random weights


def test_a_function_of_the_logits_sees_every_response_token_once_whatever_the_chunk() -> None:
    def function(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        return torch.cat((F.log_softmax(logits_NV, -1).gather(1, labels_N[:, None]), labels_N[:, None]), dim=1)

    policies = (_policy(logprob_chunk_tokens=chunk_tokens) for chunk_tokens in (None, 7))
    whole, chunked = (policy.map_logits(SEQUENCES, [2] * 9, function, width=2) for policy in policies)
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=1e-6)
    assert whole[:, 1].tolist() == [token for sequence in SEQUENCES for token in sequence[2:]]


THREE = torch.tensor([[0.5, 0.3, 0.2]]).log()


def _conditionals(label: int, top_p: float) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    how = {"temperature": 1.0, "top_p": top_p, "top_k": 0, "generator": generator}
    return conditionals(THREE, torch.tensor([label]), **how)[0].tolist()


def test_conditionals_of_three_tokens_by_hand() -> None:
    """p = (0.5, 0.3, 0.2); token 1 has 0.5 before it."""
    row = _conditionals(1, top_p=1.0)
    mean = 0.5 * np.log(0.5) + 0.3 * np.log(0.3) + 0.2 * np.log(0.2)
    variance = 0.5 * np.log(0.5) ** 2 + 0.3 * np.log(0.3) ** 2 + 0.2 * np.log(0.2) ** 2 - mean**2
    squares = np.array([0.25, 0.09, 0.04]) / 0.38
    assert row[:5] == pytest.approx([0.5, 0.3, mean, variance, 0.5], abs=1e-6)
    assert row[7] == pytest.approx(0.5 * np.abs(squares - [0.5, 0.3, 0.2]).sum(), abs=1e-6)


def test_a_token_that_cannot_be_drawn_has_no_place() -> None:
    place, probability, *_ = _conditionals(2, top_p=0.6)
    assert math.isnan(place) and probability == 0.0


def test_top_p_keeps_the_smallest_set_that_holds_it_and_top_k_the_k_likeliest() -> None:
    nucleus = processed_logprobs(THREE, temperature=1.0, top_p=0.6, top_k=0).exp()[0]
    first = processed_logprobs(THREE, temperature=1.0, top_p=1.0, top_k=1).exp()[0]
    assert nucleus.tolist() == pytest.approx([0.625, 0.375, 0.0], abs=1e-6)
    assert first.tolist() == [1.0, 0.0, 0.0]
