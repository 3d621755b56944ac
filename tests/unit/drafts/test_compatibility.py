"""Every draft that does not fit its policy is refused before an engine starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.config import ConfigError
from slipstream.drafts.compatibility import check_draft, check_draft_model
from tests.unit.drafts.small import edit_tensors, model


def _edit_config(draft: Path, **changes: object) -> None:
    path = draft / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        section = config if name in config else config["transformer_layer_config"]
        section[name] = value
    path.write_text(json.dumps(config))


def _with_maps(draft: Path, ids: list[int], marked: list[int] | None = None) -> None:
    """Make it a draft of the policy's ids `ids`, of which `t2d` marks `marked`, or all."""
    head = load_file(draft / "model.safetensors")["lm_head.weight"][: len(ids)].contiguous()
    d2t = torch.tensor([target - index for index, target in enumerate(ids)])
    t2d = torch.tensor([index in (ids if marked is None else marked) for index in range(16)])
    edit_tensors(draft, **{"lm_head.weight": head, "d2t": d2t, "t2d": t2d})
    _edit_config(draft, draft_vocab_size=len(ids))


def test_a_saved_draft_fits_its_policy_and_shares_nothing_with_it(policy: Path, draft: Path) -> None:
    check_draft(policy, draft, max_model_len=64)
    assert "embed_tokens.weight" not in load_file(draft / "model.safetensors")
    head: Any = load_file(policy / "model.safetensors")["lm_head.weight"]
    edit_tensors(draft, **{"lm_head.weight": head})
    with pytest.raises(ConfigError, match=r"draft lm_head.weight must differ from the policy's"):
        check_draft(policy, draft, max_model_len=64)
    tied = shutil.copytree(policy, draft.parent / "tied")
    edit_tensors(tied, **{"lm_head.weight": None})
    edit_tensors(draft, **{"lm_head.weight": load_file(tied / "model.safetensors")["model.embed_tokens.weight"]})
    with pytest.raises(ConfigError, match=r"draft lm_head.weight must differ from the policy's"):
        check_draft(tied, draft, max_model_len=64)
    _with_maps(draft, [2, 3, 9, 15])  # a draft of part of the vocabulary fits too
    check_draft(policy, draft, max_model_len=64)


LAYERS = "eagle_aux_hidden_state_layer_ids"
TOO_SHORT = "max_position_embeddings must be >= engine.max_model_len"
# Positions of which vLLM's table of angles holds 7 * 9.
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 7.0, "original_max_position_embeddings": 9}}


@pytest.mark.parametrize(
    ("edit", "changes", "message"),
    [
        (_edit_config, {"hidden_size": 64}, r"draft hidden_size must equal the policy's 32, got 64"),
        (_edit_config, {"vocab_size": 32}, r"draft vocab_size must equal the policy's 16, got 32"),
        (_edit_config, {"draft_vocab_size": 8}, r"lm_head.weight must be \[draft_vocab_size 8, 32\], got \(16, 32\)"),
        (_edit_config, {"max_position_embeddings": 32}, rf"draft {TOO_SHORT} 64, got 32"),
        (_edit_config, YARN, rf"draft {TOO_SHORT} 64, got 63; RoPE would be clamped"),
        (_edit_config, {LAYERS: [1, 1, 2]}, r"layer_ids must be different layers"),
        (_edit_config, {LAYERS: [0, 1, 5]}, r"must be different layers in \[0, 2\], got \[0, 1, 5\]"),
        (_edit_config, {LAYERS: [0, 1]}, r"fc.weight must be \[32, 2 aux layers x 32\]"),
        (edit_tensors, {"norm.weight": None}, r"missing \['norm.weight'\]"),
        (edit_tensors, {"surprise": torch.zeros(1)}, r"extra \['surprise'\]"),
        (edit_tensors, {"d2t": torch.zeros(3, dtype=torch.long)}, r"draft d2t must be \[16\], got \(3,\)"),
        (_with_maps, {"ids": [2, 3, 9, 16]}, r"draft d2t must lead to policy ids in \[0, 16\), got \[16\]"),
        (_with_maps, {"ids": [2, 3, 3, 9]}, r"draft d2t must lead to different policy ids, got '1 repeated'"),
        (
            _with_maps,
            {"ids": [2, 3, 9, 15], "marked": [2, 3, 9, 14]},
            r"draft t2d must mark exactly the policy ids that d2t leads to, got '2 ids",
        ),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    policy: Path, draft: Path, edit: Callable[..., None], changes: dict[str, Any], message: str
) -> None:
    edit(draft, **changes)
    with pytest.raises(ConfigError, match=message):
        check_draft(policy, draft, max_model_len=64)


def test_a_policy_and_a_directory_that_is_no_model_are_no_drafts(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be an EAGLE-3 draft"):
        check_draft(policy, policy, max_model_len=64)
    with pytest.raises(ConfigError, match=r"draft must be a model directory with a config.json, got"):
        check_draft(policy, tmp_path, max_model_len=64)
    whole = model(tmp_path / "draft")
    (whole / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"draft must have weights in \*.safetensors files, got"):
        check_draft_model(model(tmp_path / "another"), whole, max_model_len=512)


def test_a_model_of_the_same_words_fits_and_one_without_a_tokenizer_is_taken_at_its_word(tmp_path: Path) -> None:
    policy = model(tmp_path / "policy")
    check_draft_model(policy, model(tmp_path / "same"), max_model_len=512)
    check_draft_model(policy, model(tmp_path / "bare", words=None), max_model_len=512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 65}, r"draft vocab_size must equal the policy's 64, got 65; its tokens would stand for other"),
        ({"max_position_embeddings": 511}, rf"draft {TOO_SHORT} 512, got 511; vLLM stops drafting"),
        (
            {"max_position_embeddings": 256, "rope_scaling": {"type": "linear", "factor": 1.5}},
            rf"draft {TOO_SHORT} 512, got 384; vLLM stops drafting",
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
