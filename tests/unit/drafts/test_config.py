"""Rules of the draft section of a recipe, and vLLM's config that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from slipstream.drafts.config import (
    AutopilotConfig,
    DraftConfig,
    DraftInit,
    DraftLengthRule,
    DraftOnline,
    DraftScratchConfig,
)
from slipstream.drafts.methods import DraftMethod, Training
from slipstream.grpo.config import OptimizerMethod

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
            "draft.aux_hidden_state_layer_ids must rise, got (2, 1, 3)",
        ),
        (
            {"aux_hidden_state_layer_ids": (-1, 1, 2)},
            "draft.aux_hidden_state_layer_ids[0] must be >= 0, got -1",
        ),
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
        (
            {"method": DraftMethod.DRAFT_MODEL, "online": DraftOnline.ALWAYS},
            "draft.online must be off with draft.method draft_model, got 'always'; nothing of it is trained during RL",
        ),
        (
            {
                "method": DraftMethod.MTP,
                "online": DraftOnline.WHEN_STALE,
                "online_optimizer": OptimizerMethod.MUON,
            },
            "draft.online_optimizer must be adamw with draft.method mtp, got 'muon'; Muon is for the layer of an "
            "EAGLE-3 draft",
        ),
        (
            {"method": DraftMethod.SUFFIX, "length": DraftLengthRule.BY_BATCH},
            "draft.length must be fixed with suffix, got 'by_batch'; it drafts as far as its matches reach, and vLLM "
            "cannot tell it to stop earlier",
        ),
        (
            {"method": DraftMethod.SUFFIX, "autopilot": AutopilotConfig(enabled=True)},
            "draft.autopilot.enabled must be false with suffix, got True; it drafts as far as its matches reach, and "
            "vLLM cannot tell it to stop earlier",
        ),
        (
            {"prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "draft.prompt_lookup_max must be >= prompt_lookup_min 3, got 2",
        ),
    ],
)
def test_a_draft_outside_its_bounds_is_refused(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(Draft, **values) == message


def test_layers_may_begin_with_the_embeddings_and_only_a_method_that_reads_them_needs_them() -> None:
    assert DraftConfig(aux_hidden_state_layer_ids=(0, 4, 9)).reads("aux_hidden_state_layer_ids")
    assert not DraftConfig(method=DraftMethod.MTP).reads("aux_hidden_state_layer_ids")


@pytest.mark.parametrize(
    ("values", "online"),
    [
        ({"online_optimizer": OptimizerMethod.MUON}, DraftOnline.ALWAYS),
        ({"method": DraftMethod.MTP, "online_optimizer": OptimizerMethod.MUON}, DraftOnline.OFF),  # nobody reads it
        ({"method": DraftMethod.MTP}, DraftOnline.WHEN_STALE),
    ],
)
def test_a_draft_learns_with_an_optimizer_that_is_for_its_layers(values: dict[str, Any], online: DraftOnline) -> None:
    assert Draft(**values, online=online).online is online


@pytest.mark.parametrize("method", [DraftMethod.EAGLE3, DraftMethod.NGRAM])
def test_the_length_of_other_drafts_may_vary(method: DraftMethod) -> None:
    config = Draft(method=method, length=DraftLengthRule.BY_BATCH, autopilot=AutopilotConfig(enabled=True))
    assert config.length is DraftLengthRule.BY_BATCH
    fixed = Draft(method=DraftMethod.SUFFIX)
    assert (fixed.length, fixed.autopilot.enabled) == (DraftLengthRule.FIXED, False)


def test_a_given_draft_is_taken_as_it_is_or_trained_on() -> None:
    given = partial(Draft, init=DraftInit.FROM_HUB, model="here")
    assert (given(num_steps=0).trains, given(num_steps=0).is_given) == (Training.NONE, True)
    assert given(num_steps=1).trains is Training.HIDDEN_STATES
    assert not Draft().is_given


@pytest.mark.parametrize(
    ("values", "training"),
    [
        ({}, Training.HIDDEN_STATES),
        ({"method": DraftMethod.DRAFT_MODEL}, Training.RESPONSES),
        ({"method": DraftMethod.DRAFT_MODEL, "model": "here"}, Training.NONE),
        ({"method": DraftMethod.NGRAM}, Training.NONE),
    ],
)
def test_a_draft_is_pretrained_from_what_its_method_learns_from(values: dict[str, Any], training: Training) -> None:
    assert Draft(**values).trains is training


def test_training_beside_the_policy_is_as_long_and_as_deep_as_pretraining_unless_it_is_said() -> None:
    plain, own = (
        Draft(ttt_steps=3, tokens_per_step=100),
        Draft(ttt_steps=3, tokens_per_step=100, online_ttt_steps=2, online_tokens_per_update=50),
    )
    assert (plain.online_passes, plain.online_tokens) == (3, 100)
    assert (own.online_passes, own.online_tokens) == (2, 50)


def test_the_learning_rate_warms_up_and_falls_along_a_cosine_to_a_tenth() -> None:
    """Four steps of warmup; of the eight after them half is gone at step 8, where a cosine has 0.1 + 0.9 / 2."""
    config = Draft(learning_rate=0.2, warmup_steps=4, num_steps=12)
    assert [config.learning_rate_at(step) for step in range(5)] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2])
    assert [config.learning_rate_at(step) for step in (6, 8)] == pytest.approx([0.02 + 0.09 * (1 + 0.5**0.5), 0.11])
    assert [config.learning_rate_at(step) for step in (12, 99)] == pytest.approx([0.02, 0.02])
    assert Draft(learning_rate=0.2, warmup_steps=4, num_steps=4).learning_rate_at(5) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_attention_heads": 3, "num_query_groups": 2},
            "draft.scratch.num_attention_heads must be a multiple of num_query_groups 2, got 3",
        ),
    ],
)
def test_heads_of_a_draft_from_scratch_fit_together(
    refusal: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    assert refusal(DraftScratchConfig, **values) == message


def test_the_smallest_draft_from_scratch_is_taken() -> None:
    small = DraftScratchConfig(
        hidden_size=1, num_layers=1, num_attention_heads=2, num_query_groups=2, head_dim=2, ffn_hidden_size=1
    )
    assert small.num_attention_heads == 2
