"""Each family of policies against transformers, and models of these families that the learner does not compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.config import ConfigError
from slipstream.grpo.config import OptimizerConfig
from slipstream.learner.architecture import Architecture, require_divisible
from slipstream.learner.megatron import MegatronPolicy
from slipstream.types import Dtype
from tests.unit.learner import families
from tests.unit.learner.policies import LEARNER, random_sequences, save


@pytest.mark.parametrize("name", families.MODELS)
def test_a_family_is_what_transformers_computes_and_updates(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    theirs = families.write_model(source, name)
    policy = MegatronPolicy.load(source, learner=LEARNER, optimizer=OptimizerConfig(clip_grad=0.5, learning_rate=1e-3))
    written = load_file(source / "model.safetensors")
    ours = dict(policy.weights())
    assert ours.keys() == written.keys()
    assert all(torch.equal(tensor, written[weight]) for weight, tensor in ours.items())
    assert policy.architecture.num_parameters() == sum(tensor.numel() for tensor in written.values())

    exported = save(policy, tmp_path)
    assert Architecture.from_hf(exported) == policy.architecture
    again = type(theirs).from_pretrained(exported, dtype=torch.float32)
    sequences = random_sequences()
    got, states = policy.logprobs(sequences, [1] * len(sequences), 1.0), policy.hidden_states(sequences, [0, 2, 1])
    for tokens, logprobs, (aux, _) in zip(sequences, got, states, strict=True):
        with torch.no_grad():
            out, copy = (model(torch.tensor([tokens]), output_hidden_states=True) for model in (theirs, again))
        expected = torch.log_softmax(out.logits[0], dim=-1)[range(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(logprobs, expected.numpy(), rtol=0, atol=1e-5)
        inner = torch.cat([out.hidden_states[i][0] for i in (0, 2, 1)], -1)
        torch.testing.assert_close(aux, inner, rtol=0, atol=1e-5)
        assert torch.equal(out.logits, copy.logits)

    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(2):
        sequences = random_sequences(seed=seed)
        policy.lm_step(sequences, [1] * len(sequences))
        adam.zero_grad()
        rows = [torch.log_softmax(theirs(torch.tensor([tokens])).logits[0], -1) for tokens in sequences]
        learned = [row[range(len(t) - 1), t[1:]] for row, t in zip(rows, sequences, strict=True)]
        (-torch.cat(learned).mean()).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        adam.step()
    updated = dict(theirs.named_parameters())
    # AdamW's first steps are signs, 1e-3 each; a gradient near 0 is known less well.
    for weight, tensor in policy.weights():
        torch.testing.assert_close(tensor, updated[weight], rtol=0, atol=2e-4, msg=lambda m, n=weight: f"{n}: {m}")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3", {"architectures": ["GemmaForCausalLM"]}, "must be one of Qwen2ForCausalLM, .*docs/models.md"),
        ("llama3", {"attention_bias": True}, "must have attention_bias false as a LlamaForCausalLM, got True"),
        ("llama3", {"mlp_bias": True}, "must have mlp_bias false as a LlamaForCausalLM, got True"),
        ("llama3", {"hidden_act": "gelu"}, "must have hidden_act \"silu\" as a LlamaForCausalLM, got 'gelu'"),
        ("llama3", {"attention_dropout": 0.1}, "must have attention_dropout 0 as a LlamaForCausalLM, got 0.1"),
        ("llama3", {"quantization_config": {"bits": 4}}, "must have quantization_config null as a LlamaForCausalLM"),
        ("llama3", {"rope_parameters": {"type": "yarn"}}, "must use RoPE of type default or llama3, got 'yarn'"),
        ("llama3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "must have partial_rotary_factor 1, got 0.5"),
        ("llama3", {"rope_parameters": {"type": "llama3", "factor": 8.0}}, "must name every parameter of llama3 in"),
        ("llama3", {"hidden_size": None}, r"must name its sizes in config.json, got \"no \['hidden_size'\]\""),
        ("mistral", {"sliding_window": 4096}, "must use full attention, got 'sliding window 4096'; where no sequence"),
        ("qwen2", {"use_sliding_window": True}, "must use full attention, got 'sliding window True'"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "must use full attention in every layer, got"),
        ("qwen2", {"head_dim": 32}, "head_dim of a Qwen2ForCausalLM must be hidden_size / num_attention_heads = 64 /"),
        ("qwen2", {"attention_bias": False}, "must have attention_bias true as a Qwen2ForCausalLM, got False"),
        ("qwen3", {"attention_bias": True}, "must have attention_bias false as a Qwen3ForCausalLM, got True"),
    ],
)
def test_a_model_that_the_learner_does_not_compute_is_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    families.write_model(tmp_path, name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        Architecture.from_hf(tmp_path)


def test_a_mistral_without_an_entry_has_the_window_that_transformers_gives_it(tmp_path: Path) -> None:
    families.write_model(tmp_path, "mistral")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="must use full attention, got 'sliding window 4096'"):
        Architecture.from_hf(tmp_path)


def test_an_exported_model_keeps_every_token_that_ends_a_response(tmp_path: Path) -> None:
    families.write_model(tmp_path, "llama3", eos_token_id=[7, 9])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    architecture = Architecture.from_hf(tmp_path)
    assert architecture.eos_token_id == 7
    assert architecture.to_hf(Dtype.FLOAT32)["eos_token_id"] == [7, 9, 4]


def test_three_key_value_heads_are_not_split_over_two_ranks(tmp_path: Path) -> None:
    families.write_model(tmp_path, "smollm2")
    with pytest.raises(ConfigError, match=r"parallel\.tensor must divide the policy's 3 key-value heads, got 2"):
        require_divisible(Architecture.from_hf(tmp_path), tensor=2, pipeline=1)
