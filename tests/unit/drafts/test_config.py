"""Rules of the draft section of a recipe, and vLLM's config that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import Training
from slipstream.grpo.config import OptimizerMethod
from slipstream.learner.architecture import aux_layer_ids
from tests.small import draft_with
from tests.unit.refusals import refused, rows


@rows(
    """
draft.eagle3.aux_hidden_state_layer_ids=[1, 2]
    draft.eagle3.aux_hidden_state_layer_ids must be three different layers, got (1, 2); duplicates make vLLM fail with a
    shape error
draft.eagle3.aux_hidden_state_layer_ids=[1, 2, 2]
    draft.eagle3.aux_hidden_state_layer_ids must be three different layers, got (1, 2, 2); duplicates make vLLM fail
    with a shape error
draft.eagle3.aux_hidden_state_layer_ids=[2, 1, 3]
    draft.eagle3.aux_hidden_state_layer_ids must rise, got (2, 1, 3)
draft.eagle3.aux_hidden_state_layer_ids=[-1, 1, 2]
    draft.eagle3.aux_hidden_state_layer_ids[0] must be >= 0, got -1
draft.pretrain.num_steps=0
    draft.pretrain.num_steps must be > 0, got 0
draft.init=from_hub
    draft.model must be given exactly when draft.init is from_hub, got None
draft.model=here
    draft.model must be given exactly when draft.init is from_hub, got 'here'
draft.init=from_hub + draft.model=here + draft.eagle3.vocab_size=8
    draft.eagle3.vocab_size must be null with draft.init from_hub, got 8; a draft brings its own
draft.method=dflash + draft.model=a/draft
    draft.model must be null with draft.method dflash, got 'a/draft'; eagle3 and draft_model alone read one
draft.method=ngram + draft.init=from_hub + draft.model=here
    draft.init must be another one with draft.method ngram, got 'from_hub'; only an EAGLE-3 draft is trained from there
    on
draft.method=mtp + draft.online.when=when_stale + draft.online.optimizer.method=muon
    draft.online.optimizer.method must be adamw with draft.method mtp, got 'muon'; Muon is for the layer of an EAGLE-3
    draft
draft.method=suffix + draft.length=by_batch
    draft.length must be fixed with suffix, got 'by_batch'; it drafts as far as its matches reach, and vLLM cannot tell
    it to stop earlier
draft.method=suffix + draft.autopilot=true
    draft.autopilot must be false with suffix, got True; it drafts as far as its matches reach, and vLLM cannot tell it
    to stop earlier
draft.method=history + draft.autopilot=true
    draft.autopilot must be false with history, got True; it drafts as far as its matches reach, and vLLM cannot tell it
    to stop earlier
draft.history.match_min=3 + draft.history.match_max=2
    draft.history.match_max must be >= match_min 3, got 2
draft.ngram.prompt_lookup_min=3 + draft.ngram.prompt_lookup_max=2
    draft.ngram.prompt_lookup_max must be >= prompt_lookup_min 3, got 2
"""
)
def test_a_draft_outside_its_bounds_is_refused(given: str, expected: str) -> None:
    assert refused(given) == expected


def test_a_draft_learns_with_an_optimizer_that_is_for_its_layers() -> None:
    muon = {"optimizer": {"method": "muon"}}
    assert draft_with(method="eagle3", online={"when": "always", **muon}).online.when == "always"
    assert draft_with(method="mtp", online={"when": "off", **muon}).online.when == "off"  # nobody reads it
    assert draft_with(method="mtp", online={"when": "when_stale"}).online.when == "when_stale"


GIVEN = {"init": "from_hub", "model": "here"}


@pytest.mark.parametrize(
    ("values", "training", "is_given"),
    [
        ({}, Training.HIDDEN_STATES, False),
        ({**GIVEN, "pretrain": {"num_steps": 0}}, Training.NONE, True),
        ({**GIVEN, "pretrain": {"num_steps": 1}}, Training.HIDDEN_STATES, True),
        ({"method": "draft_model"}, Training.RESPONSES, False),
        ({"method": "draft_model", "model": "here"}, Training.NONE, False),
        ({"method": "ngram"}, Training.NONE, False),
    ],
)
def test_a_draft_is_pretrained_from_what_its_method_learns_from_or_taken_as_it_is_given(
    values: dict[str, Any], training: Training, is_given: bool
) -> None:
    config = draft_with(**values)
    assert (config.trains, config.is_given) == (training, is_given)


def test_training_beside_the_policy_is_as_long_and_as_deep_as_pretraining_unless_it_is_said() -> None:
    plain = draft_with(pretrain={"ttt_steps": 3, "tokens_per_step": 100})
    own = draft_with(plain, online={"ttt_steps": 2, "tokens_per_update": 50})
    assert (plain.online_passes, plain.online_tokens) == (3, 100)
    assert (own.online_passes, own.online_tokens) == (2, 50)


def test_the_learning_rate_warms_up_and_falls_along_a_cosine_to_a_tenth() -> None:
    """Four steps of warmup; of the eight after them half is gone at step 8, where a cosine has 0.1 + 0.9 / 2."""
    optimizer = {"learning_rate": 0.2, "warmup_steps": 4}
    config = draft_with(pretrain={"num_steps": 12, "optimizer": optimizer}).pretrain
    assert [config.learning_rate_at(step) for step in range(5)] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2])
    assert [config.learning_rate_at(step) for step in (6, 8)] == pytest.approx([0.02 + 0.09 * (1 + 0.5**0.5), 0.11])
    assert [config.learning_rate_at(step) for step in (12, 99)] == pytest.approx([0.02, 0.02])
    short = draft_with(pretrain={"num_steps": 4, "optimizer": optimizer}).pretrain
    assert short.learning_rate_at(5) == pytest.approx(0.02)


def test_a_draft_reads_vllms_default_layers_and_of_a_shallow_policy_the_last_three(refusal: Callable[..., str]) -> None:
    layers = {3: (0, 1, 2), 6: (3, 4, 5), 7: (2, 3, 4), 24: (2, 12, 21), 36: (2, 18, 33)}
    assert {num_layers: aux_layer_ids(None, num_layers) for num_layers in layers} == layers
    assert aux_layer_ids((0, 1, 2), 3) == (0, 1, 2)
    rule = "draft.eagle3.aux_hidden_state_layer_ids must be in [0, {0}), the policy's layers, got "
    assert refusal(aux_layer_ids, given=None, num_layers=2) == rule.format(2) + "(-1, 0, 1)"
    assert refusal(aux_layer_ids, given=(1, 2, 3), num_layers=3) == rule.format(3) + "(1, 2, 3)"


def test_a_section_that_is_shared_has_the_defaults_of_its_place_under_what_is_given() -> None:
    config = draft_with(draft_model={"shape": {"num_layers": 3}, "optimizer": {"learning_rate": 0.1}}).draft_model
    assert (config.shape.num_layers, config.shape.hidden_size, config.shape.head_dim) == (3, 64, 32)
    assert (config.optimizer.learning_rate, config.optimizer.method) == (0.1, OptimizerMethod.MUON)
    assert DraftConfig().online.optimizer.method is OptimizerMethod.ADAMW
