"""The weights that leave a policy: in a directory that others read, and as names and tensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from slipstream.learner.config import LearnerConfig, ScratchConfig
from slipstream.learner.export import save_model
from slipstream.learner.megatron import MegatronPolicy
from slipstream.types import Dtype

SCRATCH = ScratchConfig(
    hidden_size=32, num_layers=3, head_dim=16, ffn_hidden_size=48, max_position_embeddings=64, num_steps=30, seed=3
)
LEARNER = LearnerConfig(max_tokens_per_microbatch=64, num_threads=1)


def _policy(scratch: ScratchConfig = SCRATCH) -> MegatronPolicy:
    return MegatronPolicy.from_scratch(scratch, vocab_size=32, eos_token_id=1, learner=LEARNER, optimizer=None)


def _save(policy: MegatronPolicy, directory: Path) -> Path:
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "config.json").write_text('{"of": "another model"}')
    policy.save_hf(directory / "model", tokenizer)
    return directory / "model"


def test_a_saved_model_loads_to_exactly_the_same_weights_with_its_tokenizer(tmp_path: Path) -> None:
    policy = _policy()
    path = _save(policy, tmp_path)
    loaded = MegatronPolicy.load(path, learner=LEARNER, optimizer=None)
    assert all(
        name == other and torch.equal(tensor, copy)
        for (name, tensor), (other, copy) in zip(policy.weights(), loaded.weights(), strict=True)
    )
    assert loaded.architecture == policy.architecture
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_a_model_in_several_files_is_the_same_model(tmp_path: Path) -> None:
    policy = _policy()
    (tmp_path / "tokenizer").mkdir()
    largest = max(tensor.nbytes for _, tensor in policy.weights())
    taken: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in policy.weights():
            taken.append(name)
            yield name, tensor

    config = policy.architecture.to_hf(Dtype.FLOAT32)
    save_model(tmp_path / "model", config, weights(), tmp_path / "tokenizer", max_file_bytes=2 * largest)
    files = sorted(tmp_path.glob("model/*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 2 * largest for file in files)
    loaded = MegatronPolicy.load(tmp_path / "model", learner=LEARNER, optimizer=None)
    for (name, tensor), (_, copy) in zip(policy.weights(), loaded.weights(), strict=True):
        assert torch.equal(tensor, copy), name
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert {name for name, _ in theirs.named_parameters()} == set(taken)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_output_layer_are_those_of_the_checkpoint(tied: bool) -> None:
    policy = _policy(dataclasses.replace(SCRATCH, tie_word_embeddings=tied))
    named = dict(policy.weights())
    embeddings, output = policy.vocabulary_weights()
    assert torch.equal(embeddings, named["model.embed_tokens.weight"])
    assert torch.equal(output, named["model.embed_tokens.weight" if tied else "lm_head.weight"])
    assert list(policy.mtp_weights()) == []


def test_shards_of_one_rank_are_all_weights() -> None:
    policy = _policy()
    assert {part.name for held in policy.held_weights() for part in held.parts} == {
        name for name, _ in policy.weights()
    }
