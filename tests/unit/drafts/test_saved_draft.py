"""A saved draft is trained further as it was saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from slipstream.drafts.learner_draft import States
from slipstream.drafts.trainer import DraftTrainer
from tests.unit.drafts.small import CHATS, CONFIG, PROMPTS


def test_a_saved_draft_goes_round_bit_for_bit(policy: Path, states: States, tmp_path: Path) -> None:
    trained = DraftTrainer(policy, CONFIG)
    for _ in range(2):
        trained.step(CHATS, PROMPTS, states)
    trained.save(tmp_path / "first")
    loaded = DraftTrainer(policy, CONFIG, given=tmp_path / "first")
    loaded.save(tmp_path / "second")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert loaded.evaluate(CHATS, PROMPTS, states) == trained.evaluate(CHATS, PROMPTS, states)


def test_a_saved_draft_is_trained_further_from_a_fresh_optimizer(policy: Path, states: States, tmp_path: Path) -> None:
    fresh = DraftTrainer(policy, CONFIG)
    fresh.save(tmp_path / "draft")
    loaded = DraftTrainer(policy, CONFIG, given=tmp_path / "draft")
    assert [loaded.step(CHATS, PROMPTS, states) for _ in range(3)] == [
        fresh.step(CHATS, PROMPTS, states) for _ in range(3)
    ]


def test_a_saved_draft_of_other_layers_is_refused(policy: Path, draft: Path, refusal: Callable[..., str]) -> None:
    other = replace(CONFIG, aux_hidden_state_layer_ids=(0, 1, 3))
    assert (
        refusal(partial(DraftTrainer, policy, other, given=draft))
        == "draft.aux_hidden_state_layer_ids must be those of the draft, [0, 1, 2], got [0, 1, 3]"
    )


def test_a_policy_is_no_draft_to_train_further(policy: Path, refusal: Callable[..., str]) -> None:
    rule = "draft must be an EAGLE-3 draft as speculators saves it"
    assert refusal(partial(DraftTrainer, policy, CONFIG, given=policy)).startswith(rule)
