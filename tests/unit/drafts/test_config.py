"""What a recipe may say of the draft, and what vLLM is told of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from slipstream.drafts.config import DraftConfig, DraftInit
from slipstream.drafts.methods import DraftMethod

Draft = partial(DraftConfig, aux_hidden_state_layer_ids=(0, 1, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"aux_hidden_state_layer_ids": (1, 2)},
            "draft.aux_hidden_state_layer_ids must be three different layers, got (1, 2); "
            "duplicates make vLLM fail with a shape error",
        ),
        (
            {"aux_hidden_state_layer_ids": (1, 2, 2)},
            "draft.aux_hidden_state_layer_ids must be three different layers, got (1, 2, 2); "
            "duplicates make vLLM fail with a shape error",
        ),
        (
            {"aux_hidden_state_layer_ids": (2, 1, 3)},
            "draft.aux_hidden_state_layer_ids must rise from 0, got (2, 1, 3)",
        ),
        (
            {"aux_hidden_state_layer_ids": (-1, 1, 2)},
            "draft.aux_hidden_state_layer_ids must rise from 0, got (-1, 1, 2)",
        ),
        ({"num_prompts": 0}, "draft.num_prompts must be > 0, got 0"),
        ({"samples_per_prompt": 0}, "draft.samples_per_prompt must be > 0, got 0"),
        ({"num_heldout_prompts": 0}, "draft.num_heldout_prompts must be > 0, got 0"),
        ({"num_steps": 0}, "draft.num_steps must be > 0, got 0"),
        (
            {"init": DraftInit.FROM_HUB, "model": "here", "num_steps": -1},
            "draft.num_steps must be >= 0, got -1",
        ),
        (
            {"init": DraftInit.FROM_HUB},
            "draft.model must be given exactly when draft.init is from_hub, got None",
        ),
        ({"model": "here"}, "draft.model must be given exactly when draft.init is from_hub, got 'here'"),
        (
            {"init": DraftInit.FROM_HUB, "model": "here", "vocab_size": 8},
            "draft.vocab_size must be null with draft.init from_hub, got 8; a draft brings its own",
        ),
        (
            {"method": DraftMethod.NGRAM, "init": DraftInit.FROM_HUB, "model": "here"},
            "draft.init must be another one with draft.method ngram, got 'from_hub'; "
            "only an EAGLE-3 draft is trained from there on",
        ),
        ({"vocab_size": 0}, "draft.vocab_size must be > 0, got 0; null keeps the whole vocabulary"),
        ({"ttt_steps": 0}, "draft.ttt_steps must be > 0, got 0"),
        ({"tokens_per_row": 0}, "draft.tokens_per_row must be > 0, got 0"),
        ({"states_cache_gib": -0.1}, "draft.states_cache_gib must be >= 0, got -0.1"),
        ({"loss_chunk_tokens": 0}, "draft.loss_chunk_tokens must be > 0, got 0"),
        ({"loss": "mse"}, "draft.loss must be one of kl_div, tv, lk, lk_hybrid, got 'mse'"),
    ],
)
def test_a_draft_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(Draft, **values) == message


@pytest.mark.parametrize("loss", ["kl_div", "tv", "lk", "lk_hybrid"])
def test_a_draft_on_its_bounds_is_taken(loss: str) -> None:
    config = Draft(
        num_prompts=1,
        samples_per_prompt=1,
        num_heldout_prompts=1,
        num_steps=1,
        ttt_steps=1,
        tokens_per_row=1,
        states_cache_gib=0.0,
        loss_chunk_tokens=1,
        loss=loss,
    )
    assert config.loss == loss
