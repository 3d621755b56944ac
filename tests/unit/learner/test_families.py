"""Each family of policies against transformers, and models of these families that the learner does not compute."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from slipstream.config import ConfigError
from slipstream.grpo.config import OptimizerConfig
from slipstream.learner.architecture import Architecture, num_positions
from slipstream.learner.config import RopeConfig
from slipstream.learner.megatron import MegatronPolicy
from slipstream.types import Dtype
from tests.unit.learner import families
from tests.unit.learner.policies import LEARNER, chosen, random_sequences, require_close, save, torch_step
from tests.unit.refusals import rows

OPTIMIZER = OptimizerConfig(clip_grad=0.5, learning_rate=1e-3, weight_decay=1.0)
ABSENT = object()


def scaled(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_theta": 9.0, "rope_scaling": {"type": kind, **values}}


@pytest.mark.parametrize("name", families.MODELS)
def test_a_family_is_what_transformers_computes_and_updates(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    theirs = families.write_model(source, name)
    policy = MegatronPolicy.load(source, learner=LEARNER, optimizer=OPTIMIZER)
    written = load_file(source / "model.safetensors")
    ours = dict(policy.weights())
    assert ours.keys() == written.keys()
    assert all(torch.equal(tensor, written[weight]) for weight, tensor in ours.items())
    assert policy.architecture.num_parameters() == sum(tensor.numel() for tensor in written.values())

    exported = save(policy, tmp_path)
    assert {file.name for file in exported.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert Architecture.from_hf(exported) == policy.architecture
    again = type(theirs).from_pretrained(exported, dtype=torch.float32)
    sequences = random_sequences()
    got, states = policy.logprobs(sequences, [3] * len(sequences), 0.8), policy.hidden_states(sequences, [0, 2, 1])
    for tokens, logprobs, (aux, last) in zip(sequences, got, states, strict=True):
        with torch.no_grad():
            out, copy = (model(torch.tensor([tokens]), output_hidden_states=True) for model in (theirs, again))
        np.testing.assert_allclose(logprobs, chosen(out.logits[0], tokens, 3, 0.8).numpy(), rtol=0, atol=1e-5)
        hidden = [each[0] for each in out.hidden_states]
        torch.testing.assert_close(aux, torch.cat([hidden[i] for i in (0, 2, 1)], -1), rtol=0, atol=1e-5)
        torch.testing.assert_close(last, hidden[-1], rtol=0, atol=1e-5)
        assert torch.equal(out.logits, copy.logits)

    matrices = [each for each in theirs.parameters() if each.dim() == 2]
    vectors = {"params": [each for each in theirs.parameters() if each.dim() == 1], "weight_decay": 0.0}
    decay = OPTIMIZER.weight_decay
    adam = torch.optim.AdamW([{"params": matrices, "weight_decay": decay}, vectors], lr=1e-3, betas=(0.9, 0.95))
    for seed in range(2):
        sequences = random_sequences(seed=seed)
        loss, _ = torch_step(theirs, adam, sequences, 1)
        assert policy.lm_step(sequences, [1] * len(sequences)) == pytest.approx(loss, abs=1e-5)
    # AdamW's first steps are signs, 1e-3 each; a gradient near 0 is known less well.
    require_close(policy, dict(theirs.named_parameters()), atol=2e-4)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3", {"architectures": ["GemmaForCausalLM"]}, "must be one of Qwen2ForCausalLM, .*docs/models.md"),
        ("llama3", {"attention_bias": True}, "must have attention_bias false as a LlamaForCausalLM, got True"),
        ("llama3", {"mlp_bias": True}, "must have mlp_bias false as a LlamaForCausalLM, got True"),
        ("llama3", {"hidden_act": "gelu"}, "must have hidden_act \"silu\" as a LlamaForCausalLM, got 'gelu'"),
        ("llama3", {"attention_dropout": 0.1}, "must have attention_dropout 0 as a LlamaForCausalLM, got 0.1"),
        ("llama3", {"quantization_config": {"bits": 4}}, "must have quantization_config null as a LlamaForCausalLM"),
        ("llama3", scaled("dynamic"), "must use RoPE of type default, linear, llama3, yarn, got 'dy"),
        ("llama3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "must have partial_rotary_factor 1, got 0.5"),
        (
            "llama3",
            scaled("llama3", factor=8.0),
            "complete scaling in .*/config.json: rope_scaling.low_freq_factor must be given with type llama3",
        ),
        ("yarn", scaled("yarn", factor=None), "rope_scaling.factor must be of type float, got No"),
        ("llama3", {"hidden_size": None}, r"must name its sizes in config.json, got \"no \['hidden_size'\]\""),
        ("mistral", {"num_key_value_heads": ABSENT}, r"got \"no \['num_key_value_heads'\]\""),  # transformers takes 8
        ("qwen3", {"head_dim": None}, r"must name its sizes in config.json, got \"no \['head_dim'\]\""),
        ("mistral", {"sliding_window": 4096}, "must use full attention, got 'sliding window 4096'; where no sequence"),
        ("mistral", {"sliding_window": ABSENT}, "must use full attention, got 'sliding window 4096'"),  # transformers'
        ("qwen2", {"use_sliding_window": True}, "must use full attention, got 'sliding window True'"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "must use full attention in every layer, got"),
        ("qwen2", {"head_dim": 32}, "head_dim of a Qwen2ForCausalLM must be hidden_size / num_attention_heads = 64 /"),
        ("qwen2", {"attention_bias": False}, "must have attention_bias true as a Qwen2ForCausalLM, got False"),
    ],
)
def test_a_model_that_the_learner_does_not_compute_is_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    families.write_model(tmp_path, name)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({field: value for field, value in config.items() if value is not ABSENT}))
    with pytest.raises(ConfigError, match=message):
        Architecture.from_hf(tmp_path)


def test_an_exported_model_keeps_every_token_that_ends_a_response(tmp_path: Path) -> None:
    families.write_model(tmp_path, "llama3", eos_token_id=[7, 9])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    architecture = Architecture.from_hf(tmp_path)
    assert architecture.eos_token_ids == (7, 9, 4)
    assert architecture.to_hf(Dtype.FLOAT32)["eos_token_id"] == [7, 9, 4]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3},
        {k: v for k, v in families.LLAMA3.items() if k != "rope_theta"},
        {"rope_type": "yarn", "factor": 8.0},  # of the 64 positions of the config itself
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 0.7},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 3, "beta_slow": 0.2, "mscale": 0.7, "mscale_all_dim": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "truncate": False},
    ],
    ids=lambda scaling: "-".join(map(str, scaling.values())),
)
def test_angles_of_either_spelling_are_transformers(scaling: dict[str, Any], spelling: str, tmp_path: Path) -> None:
    families.write_model(tmp_path, "llama3")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    if spelling == "rope_parameters":
        config["rope_parameters"] = {**scaling, "rope_theta": 500.0}
    else:
        old = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
        # What transformers 5 wrote, and a user then scaled: transformers takes the older entry.
        config |= {"rope_scaling": old, "rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}}
    path.write_text(json.dumps(config))
    policy = MegatronPolicy.load(tmp_path, learner=LEARNER, optimizer=None)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).model.rotary_emb
    assert torch.equal(policy._gpt.rotary_pos_emb.inv_freq, theirs.inv_freq)
    scale = _yarn_get_concentration_factor_from_config(policy._gpt.config)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)
    assert (scale != 1.0) == (scaling["rope_type"] == "yarn")


def extended(architecture: Architecture, **rope: Any) -> Architecture:
    return architecture.extended(RopeConfig(**rope))


def test_a_section_extends_a_model_without_scaling_as_vllm_counts_its_positions(tmp_path: Path) -> None:
    families.write_model(tmp_path, "llama2")
    own = Architecture.from_hf(tmp_path)
    assert own.extended(None) is own
    linear, scaling = extended(own, type="linear", factor=4), {"rope_type": "linear", "factor": 4.0}
    assert linear.positions_to_hf() == {
        "max_position_embeddings": 64,  # vLLM multiplies them by the factor itself
        "rope_parameters": {"rope_theta": 10_000.0, **scaling},
        "rope_theta": 10_000.0,
        "rope_scaling": scaling,
    }
    yarn = extended(own, type="yarn", factor=4, original_max_position_embeddings=48)
    assert yarn.positions_to_hf()["max_position_embeddings"] == 192
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}
    assert yarn.positions_to_hf()["rope_scaling"] == scaling
    llama3 = extended(own, type="llama3", factor=2, low_freq_factor=1, high_freq_factor=4)
    assert [each.num_positions for each in (own, linear, yarn, llama3)] == [64, 256, 192, 128]
    for each in (linear, yarn, llama3):
        (tmp_path / "config.json").write_text(json.dumps(each.to_hf(Dtype.FLOAT32)))
        assert Architecture.from_hf(tmp_path) == each
        assert each.rope_scaling is not None
        assert each.extended(each.rope_scaling) is each  # a section that says what the model says itself
    longer = {**yarn.to_hf(Dtype.FLOAT32), "max_position_embeddings": 999}
    assert num_positions(longer) == 192  # vLLM's table ends there


@rows(
    """
yarn {type: yarn, factor: 4.0}
    policy.rope.factor must be the model's own 8.0, got 4.0; leave policy.rope out: the config.json has the scaling that
    the model was trained with
llama3 {type: linear, factor: 8.0}
    policy.rope.type must be the model's own "llama3", got 'linear
linear {type: linear, factor: 4.0, original_max_position_embeddings: 16}
    model's own null, got 16
llama2 {type: yarn, factor: 4.0, original_max_position_embeddings: 65}
    policy.rope.original_max_position_embeddings must be <= the policy's 64 positions, got 65; it is the length that the
    model was trained on
llama2 {type: yarn, factor: 3.9, original_max_position_embeddings: 16}
    policy.rope.factor must extend 16 original positions to the policy's 64 at least, got 3.9; raise it
"""
)
def test_a_section_that_contradicts_the_model_is_refused(given: str, expected: str, tmp_path: Path) -> None:
    name, _, rope = given.partition(" ")
    families.write_model(tmp_path, name)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        extended(Architecture.from_hf(tmp_path), **yaml.safe_load(rope))
