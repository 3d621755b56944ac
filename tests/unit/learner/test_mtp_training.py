"""A MiMo in the learner: its trunk against transformers, its MTP layer against vLLM's formula, and how it learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.config import ConfigError
from slipstream.grpo.config import OptimizerConfig, OptimizerMethod
from slipstream.learner.architecture import Architecture
from slipstream.learner.checkpoint import CheckpointError
from slipstream.learner.config import LearnerConfig, Packing
from slipstream.learner.cpu import host
from slipstream.learner.layers import build_mtp
from slipstream.learner.megatron import MegatronPolicy
from slipstream.learner.weights import Shard, hf_from_shards, initial_weights, load_exactly, mtp_mappings, shard_from_hf
from slipstream.types import Dtype
from tests.unit.learner import mimo
from tests.unit.learner.policies import LEARNER, OPTIMIZER, chosen, new_policy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return mimo.write_model(tmp_path / "model")


def _load(
    path: Path, learner: LearnerConfig = LEARNER, optimizer: OptimizerConfig | None = OPTIMIZER
) -> MegatronPolicy:
    return MegatronPolicy.load(path, learner=learner, optimizer=optimizer)


def _mtp_weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.mtp_weights()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _drafting(policy: MegatronPolicy, sequences: Sequence[tuple[int, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return policy.hidden_states(sequences, policy.architecture.mtp_layer_ids)


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ALWAYS])
def test_the_trunk_computes_what_transformers_does(packing: Packing, path: Path) -> None:
    policy = _load(path, replace(LEARNER, packing=packing), None)
    sequences = mimo.sequences()
    got = policy.logprobs(sequences, [3] * len(sequences), 0.8)
    for tokens, logprobs in zip(sequences, got, strict=True):
        expected = chosen(mimo.trunk(path, tokens)[1], tokens, 3, 0.8)
        np.testing.assert_allclose(logprobs, expected.numpy(), rtol=0, atol=5e-6)


def test_the_mtp_layer_computes_what_vllms_formula_says(path: Path) -> None:
    policy = _load(path, LEARNER, None)
    tokens = mimo.sequences()[0]
    ((states_TH, _),) = _drafting(policy, [tokens])
    expected_states, _ = mimo.trunk(path, tokens)
    torch.testing.assert_close(states_TH, expected_states, rtol=0, atol=1e-5)
    weights = load_file(path / "model.safetensors")
    with host.cuda_as_cpu():
        mtp = build_mtp(mimo.ARCH, LEARNER)
        assert mtp is not None
        load_exactly(mtp, shard_from_hf(weights.__getitem__, mimo.ARCH, Shard(), mtp_mappings(mimo.ARCH)))
        num = len(tokens) - 1
        drafted_T1H = mtp(
            states_TH[:num, None],
            weights["model.embed_tokens.weight"][torch.tensor(tokens[1:])][:, None],
            positions_BT=torch.arange(num)[None],
            angles_S11D=policy._gpt.rotary_pos_emb(num),
        )
    expected = mimo.logits(path, mimo.mtp_states(path, states_TH, tokens))
    torch.testing.assert_close(mimo.logits(path, drafted_T1H[:, 0]), expected, rtol=0, atol=1e-5)


def test_a_saved_mimo_is_the_one_that_was_loaded_to_the_last_bit(path: Path, tmp_path: Path) -> None:
    _load(path).save_hf(tmp_path / "saved", path)
    assert _same(load_file(tmp_path / "saved" / "model.safetensors"), load_file(path / "model.safetensors"))
    saved, given = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "saved", path))
    assert saved == given
    assert Architecture.from_hf(path) == mimo.ARCH


@pytest.mark.parametrize("size", [1, 2])
def test_shards_of_the_mtp_layer_join_to_what_they_were_cut_from(size: int) -> None:
    full, joined, own = mimo.random_weights(), dict[str, torch.Tensor](), list(mtp_mappings(mimo.ARCH))
    ranks = [Shard(tensor_rank=rank, tensor_size=size) for rank in range(size)]
    shards = [dict(shard_from_hf(full.__getitem__, mimo.ARCH, rank, own)) for rank in ranks]
    for mapping in own:
        joined |= dict(hf_from_shards(mapping, [shard[mapping.megatron] for shard in shards], mimo.ARCH))
    assert _same(joined, {name: tensor for name, tensor in full.items() if "mtp_layers" in name})
    assert len(joined) == 3 + 1 + 2 + 7 + 3  # norms and input_proj outside, norms, matrices and biases of the layer
    assert mimo.ARCH.num_parameters() == sum(tensor.numel() for tensor in full.values())


def test_an_mtp_layer_changes_no_weight_that_is_drawn_for_the_rest() -> None:
    without, having = (initial_weights(replace(mimo.ARCH, num_mtp_layers=num), std=0.1, seed=5) for num in (0, 1))
    assert _same(without, {name: having[name] for name in without})
    assert all(not having[name].any() for name in having if name.endswith(".bias"))


def test_pretraining_learns_the_same_trunk_with_and_without_the_mtp_layers_loss(path: Path) -> None:
    alone, both = _load(path), _load(path)
    both.start_mtp(OPTIMIZER)
    assert len({policy.lm_step(mimo.sequences(), [1] * 9) for policy in (alone, both)}) == 1
    assert _same(dict(both.weights()), dict(alone.weights()))
    assert alone.mtp_loss is None
    assert both.mtp_loss is not None and both.mtp_loss > 0


def test_the_loss_is_the_divergence_from_the_policy_of_every_token_after_the_first_of_the_response(path: Path) -> None:
    policy = _load(path, replace(LEARNER, logprob_chunk_tokens=5))
    trainer = policy.start_mtp(OPTIMIZER)
    sequences, start = mimo.sequences(3), 3
    states = _drafting(policy, sequences)
    divergences, overlaps = [], []
    for tokens, (states_TH, _) in zip(sequences, states, strict=True):
        _, logits = mimo.trunk(path, tokens)
        policy_TV = torch.log_softmax(logits / 0.7, -1)
        draft_TV = torch.log_softmax(mimo.logits(path, mimo.mtp_states(path, states_TH, tokens)) / 0.7, -1)
        for position in range(start - 1, len(tokens) - 2):  # drafts the token two later
            p, q = policy_TV[position + 1], draft_TV[position]
            divergences.append(float((p.exp() * (p - q)).sum()))
            overlaps.append(float(torch.minimum(p.exp(), q.exp()).sum()))
    rates, length = trainer.evaluate(sequences, [start] * 3, states, num_tokens=1, temperature=0.7)
    assert rates[0] == pytest.approx(np.mean(overlaps), abs=1e-5)
    assert length == pytest.approx(1.0 + np.mean(overlaps), abs=1e-5)
    loss = trainer.step(sequences, [start] * 3, states, learning_rate=1e-3, temperature=0.7)
    assert loss == pytest.approx(np.mean(divergences), abs=1e-4)


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ALWAYS])
def test_a_window_is_drafted_from_what_the_layer_gave_for_its_last_token(packing: Packing, path: Path) -> None:
    """Three tokens ahead, against vLLM's formula applied again and again."""
    policy = _load(path, replace(LEARNER, packing=packing))
    trainer = policy.start_mtp(OPTIMIZER)
    sequences = [tokens for tokens in mimo.sequences(9) if len(tokens) > 9]
    starts = [3] * len(sequences)
    states = _drafting(policy, sequences)
    chances = []
    for tokens, (states_TH, _) in zip(sequences, states, strict=True):
        policy_TV = mimo.trunk(path, tokens)[1].softmax(-1)
        read, drafts = states_TH, []
        for index in range(3):
            drafted = mimo.mtp_states(path, read, tokens)
            drafts.append(mimo.logits(path, drafted).softmax(-1))
            read = torch.cat([states_TH[: index + 1], drafted[index:]])
        for first in range(2, len(tokens) - 4):  # the position whose next token is the response's first, and so on
            pairs = [(policy_TV[first + i + 1], drafts[i][first + i]) for i in range(3)]
            chances.append([float(torch.minimum(p, q).sum()) for p, q in pairs])
    rates, length = trainer.evaluate(sequences, starts, states, num_tokens=3)
    np.testing.assert_allclose(rates, np.mean(chances, axis=0), atol=1e-5)
    assert length == pytest.approx(1.0 + np.cumprod(chances, axis=1).sum(axis=1).mean(), abs=1e-5)


@pytest.mark.parametrize("method", OptimizerMethod)
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_a_resumed_mtp_layer_goes_on_bit_for_bit(method: OptimizerMethod, dtype: Dtype, path: Path) -> None:
    learner, optimizer = replace(LEARNER, dtype=dtype), replace(OPTIMIZER, method=method)
    policy = _load(path, learner)
    trainer = policy.start_mtp(optimizer)
    sequences = mimo.sequences()
    update = sequences, [2] * len(sequences), _drafting(policy, sequences)
    trainer.step(*update, learning_rate=1e-2)
    state = {name: tensor.clone() for name, tensor in trainer.state().items()}
    expected = [trainer.step(*update, learning_rate=1e-2) for _ in range(2)]
    other = _load(path, learner)
    resumed = other.start_mtp(optimizer)
    resumed.restore(state)
    assert resumed.num_updates == 1
    assert [resumed.step(*update, learning_rate=1e-2) for _ in range(2)] == expected
    assert _same(_mtp_weights(other), _mtp_weights(policy))


def test_a_state_of_another_model_and_a_policy_without_an_mtp_layer_are_refused(path: Path) -> None:
    trainer = _load(path).start_mtp(OPTIMIZER)
    with pytest.raises(CheckpointError, match=r"must hold the policy's MTP layer, has no main/model\.mtp_layers\.0"):
        trainer.restore({"num_updates": torch.tensor([1]), "0.parameter": torch.zeros(1)})
    with pytest.raises(ConfigError, match="mtp needs a policy with an MTP layer, got 'Qwen3ForCausalLM'"):
        new_policy(optimizer=None).start_mtp(OPTIMIZER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "must have num_nextn_predict_layers 1 as a MiMoForCausalLM, got 2"),
        ({"num_nextn_predict_layers": None}, "must have num_nextn_predict_layers 1 as a MiMoForCausalLM, got None"),
        ({"head_dim": 16}, "must be hidden_size / num_attention_heads = 128 / 4"),
    ],
)
def test_a_mimo_that_vllm_would_read_otherwise_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(mimo.ARCH.to_hf(LEARNER.dtype) | change))
    with pytest.raises(ConfigError, match=message):
        Architecture.from_hf(tmp_path)
