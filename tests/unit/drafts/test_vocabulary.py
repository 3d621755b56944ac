"""A draft of part of the vocabulary: which part, and that it is trained, measured and saved as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from slipstream.drafts.compatibility import check_draft
from slipstream.drafts.eagle3 import vocabulary_maps
from slipstream.drafts.learner_draft import Chats
from slipstream.drafts.passes import head_inputs, rows_of
from slipstream.drafts.pretrain import frequent_tokens, require_cut
from slipstream.drafts.trainer import DraftTrainer
from tests.small import draft_with
from tests.unit.drafts.small import CHATS, CONFIG, PROMPTS, teach

RESPONSES = [chat[start:] for chat, start in zip(CHATS, PROMPTS, strict=True)]
KNOWN = (2, 5, 6, 7, 8, 9)


@pytest.mark.parametrize(
    ("known", "num_said"), [((3, 7, 8, 9), 11), ((3, 5, 7, 8, 9), 13), ((0, 1, 3, 5, 6, 7, 8, 9), 15)]
)
def test_the_most_frequent_tokens_are_known_and_of_equals_the_smaller(known: tuple[int, ...], num_said: int) -> None:
    # 7 8 9 5 6 7 8 9 3 and 5 6 7 8 9 3: of 7, 8 and 9 there are three each, of 3, 5 and 6 two.
    found, share = frequent_tokens(RESPONSES, num=len(known), vocab_size=16)
    assert (found, share) == (known, num_said / 15)
    d2t, t2d = build_vocab_mappings_from_distribution({3: 2, 5: 2, 6: 2, 7: 3, 8: 3, 9: 3}, len(known), 16)
    ours = vocabulary_maps(known, 16)
    assert torch.equal(ours[0], t2d) and torch.equal(ours[1], d2t)


def test_a_cut_that_is_none_is_refused(refusal: Callable[..., str]) -> None:
    rule = "draft.eagle3.vocab_size must be < the policy's 16 tokens, got 16; null keeps the whole vocabulary"
    assert refusal(partial(require_cut, 16, 16), field="draft.eagle3.vocab_size") == rule


def test_a_draft_of_a_cut_vocabulary_learns_and_fits_its_policy(policy: Path, chats: Chats, tmp_path: Path) -> None:
    trainer = DraftTrainer(policy, CONFIG, token_ids=KNOWN)
    teach(trainer, chats, 20)
    trainer.save(tmp_path / "draft")
    check_draft(policy, tmp_path / "draft", max_model_len=64)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert (torch.arange(6) + tensors["d2t"]).tolist() == list(KNOWN)
    assert tensors["lm_head.weight"].shape == (6, 32)
    again = DraftTrainer(policy, CONFIG, given=tmp_path / "draft")
    again.save(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "draft" / name).read_bytes()
    assert again.evaluate(chats) == trainer.evaluate(chats)


def test_what_a_draft_does_not_know_counts_as_not_accepted(policy: Path, chats: Chats) -> None:
    """By the policy's probabilities over its whole vocabulary, while the draft's are over what it knows."""
    config = draft_with(CONFIG, pretrain={"ttt_steps": 1})
    trainer = DraftTrainer(policy, config, token_ids=KNOWN)
    (row,) = rows_of(chats, max_tokens=64)
    head = load_file(policy / "model.safetensors")["lm_head.weight"]
    with torch.no_grad():
        p = (row.last[0] @ head.t()).softmax(-1)[:, list(KNOWN)].numpy()
        q = trainer._model.lm_head(head_inputs(trainer._model, row, 1)[0])[0].softmax(-1).numpy()
    expected = np.minimum(p, q).sum(-1)[row.loss_mask[0].numpy()].mean()
    (rate,), _ = trainer.evaluate(chats)
    assert rate == pytest.approx(expected, rel=1e-5)
    assert p.sum(-1).min() < 0.9


def test_a_cut_draft_follows_the_policys_present_head(policy: Path) -> None:
    trainer = DraftTrainer(policy, CONFIG, token_ids=KNOWN)
    head = torch.arange(16.0)[:, None].expand(16, 32)
    trainer.follow(lambda: (torch.zeros(16, 32), head))
    assert trainer._model.verifier_lm_head.weight[:, 0].tolist() == list(KNOWN)
