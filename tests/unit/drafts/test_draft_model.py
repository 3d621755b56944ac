"""A model that cannot draft for the policy is refused by what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.config import ConfigError
from slipstream.drafts.compatibility import check_draft_model
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.distill import link_draft_model, num_parameters, scratch_model
from slipstream.drafts.methods import DraftMethod
from slipstream.grpo.config import OptimizerMethod

WORDS = {"a": 0, "b": 1}


def model(path: Path, words: dict[str, int] | None = WORDS, **changes: Any) -> Path:
    path.mkdir()
    values = {"vocab_size": 64, "max_position_embeddings": 512, "eos_token_id": 3, **changes}
    (path / "config.json").write_text(json.dumps(values))
    save_file({"w": torch.zeros(2, 3)}, path / "model.safetensors")
    if words is not None:
        added = [{"content": "<end>", "id": 3}]
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": added}))
    return path


def test_a_model_of_the_same_words_fits_and_one_without_a_tokenizer_is_taken_at_its_word(tmp_path: Path) -> None:
    policy = model(tmp_path / "policy")
    check_draft_model(policy, model(tmp_path / "same"), max_model_len=512)
    check_draft_model(policy, model(tmp_path / "bare", words=None), max_model_len=512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 65}, r"draft vocab_size must equal the policy's 64, got 65; its tokens would stand for other"),
        (
            {"max_position_embeddings": 511},
            r"draft max_position_embeddings must be >= engine.max_model_len 512, got 511; vLLM stops drafting",
        ),
        (
            {"words": {"a": 1, "b": 0}},
            r"draft tokenizer must give every word the policy's id, got \"others for \['a', 'b'\]\"",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    policy, draft = model(tmp_path / "policy"), model(tmp_path / "draft", **changes)
    with pytest.raises(ConfigError, match=message):
        check_draft_model(policy, draft, max_model_len=512)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "draft must be a model directory with a config.json, got"),
        ("model.safetensors", r"draft must have weights in \*.safetensors files, got"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, missing: str, message: str) -> None:
    policy, draft = model(tmp_path / "policy"), model(tmp_path / "draft")
    (draft / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        check_draft_model(policy, draft, max_model_len=512)


def test_a_model_that_is_not_there_is_refused_by_the_field_that_names_it(tmp_path: Path) -> None:
    config = DraftConfig(method=DraftMethod.DRAFT_MODEL, model=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"draft.model must be a local directory or a reachable hub id, got '.*nowh"):
        link_draft_model(config, model(tmp_path / "policy"), tmp_path / "draft", max_model_len=512)


def test_links_are_laid_anew_by_a_retry_and_parameters_counted(tmp_path: Path) -> None:
    policy, given = model(tmp_path / "policy"), model(tmp_path / "given")
    config = DraftConfig(method=DraftMethod.DRAFT_MODEL, model=str(given))
    for _ in range(2):
        assert link_draft_model(config, policy, tmp_path / "draft", max_model_len=512) == 6
    assert sorted(path.name for path in (tmp_path / "draft").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert num_parameters(tmp_path / "draft") == 6


def test_a_small_model_has_the_policys_vocabulary_and_positions_and_the_drafts_training(tmp_path: Path) -> None:
    config = DraftConfig(method=DraftMethod.DRAFT_MODEL, num_steps=10, warmup_steps=20, learning_rate=0.1, seed=4)
    scratch, vocab_size, eos = scratch_model(config, model(tmp_path / "policy", eos_token_id=[5, 6]))
    assert (vocab_size, eos) == (64, 5)
    assert (scratch.hidden_size, scratch.num_layers, scratch.max_position_embeddings) == (64, 2, 512)
    assert (scratch.num_steps, scratch.warmup_steps, scratch.learning_rate, scratch.seed) == (10, 10, 0.1, 4)
    assert scratch.optimizer is OptimizerMethod.MUON
