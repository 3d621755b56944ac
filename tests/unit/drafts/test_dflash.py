"""A DFlash draft computes in training what speculators does, and is saved as vLLM reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.drafts.compatibility import require_fit
from slipstream.drafts.dflash import attend_to_blocks, block_inputs, build_dflash, mask_token_id
from slipstream.drafts.learner_draft import Chats
from slipstream.drafts.passes import pack_chats
from slipstream.drafts.trainer import DraftTrainer
from tests.small import draft_with
from tests.unit.drafts.small import CHATS, PROMPTS, policy_of, states_of, teach

CONFIG = draft_with(
    method="dflash",
    dflash={"optimizer": {"warmup_steps": 2, "learning_rate": 1e-2}},
    pretrain={"num_steps": 30, "ttt_steps": 3},
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of three layers, as many as a draft reads."""
    return policy_of(tmp_path_factory.mktemp("policy"), num_layers=3)


@pytest.fixture(scope="module")
def chats(policy: Path) -> Chats:
    return Chats(CHATS, PROMPTS, [(aux_TA[:, :96], last_TH) for aux_TA, last_TH in states_of(policy)])


def test_a_block_after_every_token_is_what_speculators_computes_of_it(policy: Path, chats: Chats) -> None:
    """Chats of one row, whose tokens all are anchors there but for the first and the last of each."""
    ours = build_dflash(policy, CONFIG)
    found = block_inputs(ours, pack_chats(chats), 3)
    theirs = build_dflash(policy, CONFIG)
    for layer in theirs.layers:
        layer.self_attn.config._attn_implementation = "sdpa"
    row = 0
    for tokens, (aux_TA, last_TH) in zip(CHATS, chats.states, strict=True):
        num = len(tokens)
        inside = torch.zeros(1, num + 4)  # speculators leaves out the last tokens, as many as a block has
        inside[0, 1:num] = 1
        padded = [torch.nn.functional.pad(each, (0, 0, 0, 4))[None] for each in (aux_TA, last_TH)]
        ids = torch.tensor([[*tokens, 0, 0, 0, 0]])
        documents = torch.zeros(1, num + 4, dtype=torch.long)
        hidden = theirs._backbone_forward(padded[0], ids, inside, padded[1], documents, max_anchors=num - 1)[0]
        blocks = hidden.view(num - 1, 4, -1)
        for token in range(3):
            torch.testing.assert_close(found[token][0, row : row + num - 1], blocks[:, token + 1])
        row += num - 1
    assert row == found[0].shape[1]


def test_a_block_sees_earlier_states_and_itself_in_both_directions() -> None:
    """Two chats of two and one tokens, blocks of two: a value that is one for one key shows who attends to it."""
    chats = [2, 1]
    query, key = torch.zeros(1, 1, 6, 1), torch.zeros(1, 1, 9, 1)
    seen = []
    for number in range(9):  # three states, then blocks of two
        value = torch.eye(9)[number].view(1, 1, 9, 1)
        found, _ = attend_to_blocks(torch.nn.Identity(), query, key, value, chats, scaling=1.0)
        seen.append((found[0, :, 0, 0] > 0).int().tolist())
    assert seen == [
        [1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1],
        *[[1, 1, 0, 0, 0, 0]] * 2,
        *[[0, 0, 1, 1, 0, 0]] * 2,
        *[[0, 0, 0, 0, 1, 1]] * 2,
    ]


def test_training_lowers_the_loss_and_raises_held_out_acceptance(policy: Path, chats: Chats) -> None:
    assert len(teach(DraftTrainer(policy, CONFIG), chats, 30, falls_to=0.5)) == 3


@pytest.mark.parametrize("token_ids", [None, tuple(range(3, 12))])
def test_a_saved_draft_fits_its_policy(policy: Path, tmp_path: Path, token_ids: tuple[int, ...] | None) -> None:
    DraftTrainer(policy, CONFIG, token_ids=token_ids).save(tmp_path / "draft")
    require_fit(CONFIG, policy, tmp_path / "draft", max_model_len=64)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (config["architectures"], config["block_size"]) == (["DFlashDraftModel"], 4)
    assert (config["sliding_window_non_causal"], config["sample_from_anchor"]) == (True, False)
    assert config["mask_token_id"] in range(16)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert len(tensors["lm_head.weight"]) == (16 if token_ids is None else 9)
    assert ("d2t" in tensors) == (token_ids is not None)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("speculators_model_type", "dflash2", "draft must be a DFlash draft as speculators saves it, got 'dflash2'"),
        ("sliding_window_non_causal", False, "draft sliding_window_non_causal must be true, got False"),
        ("mask_token_id", 16, "draft mask_token_id must be an id of the policy's 16 tokens, got 16"),
    ],
)
def test_a_draft_that_vllm_would_not_run_as_it_was_trained_is_refused(
    policy: Path, tmp_path: Path, field: str, value: object, error: str
) -> None:
    DraftTrainer(policy, CONFIG).save(tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ValueError, match="^" + error):
        require_fit(CONFIG, policy, tmp_path / "draft", max_model_len=64)


def test_the_mask_is_no_row_of_padding() -> None:
    assert mask_token_id(torch.tensor([[1.0, 1.0], [1.0, 0.9], [1.1, 1.0], [0.0, 0.0], [0.0, 0.1]])) == 2
