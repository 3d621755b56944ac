"""The one table that sets the methods apart, and what it decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from slipstream.drafts.config import DraftConfig, DraftInit, DraftOnline
from slipstream.drafts.methods import TRAITS, DraftMethod, Training, Weights, require_package

Draft = partial(DraftConfig, aux_hidden_state_layer_ids=(0, 1, 2))
DIRECTORY = Path("draft")


def test_suffix_without_its_package_is_refused(
    refusal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert refusal(require_package, method=DraftMethod.SUFFIX) == (
        "draft.method must do without the package arctic_inference, which is not here, got 'suffix'; "
        "install arctic-inference, which compiles C++, or take ngram"
    )


def test_every_method_has_traits_and_every_field_a_method_that_reads_it() -> None:
    assert set(TRAITS) == set(DraftMethod)
    read = {name for traits in TRAITS.values() for name in traits.fields}
    assert read == {field.name for field in fields(DraftConfig)} - {"method", "length", "autopilot"}  # of any


def test_only_what_has_weights_is_trained() -> None:
    for traits in TRAITS.values():
        assert traits.weights is not Weights.NONE or (traits.training is Training.NONE and not traits.trains_online)


def test_a_draft_model_that_is_given_is_not_trained_and_one_that_is_not_is() -> None:
    assert DraftConfig(method=DraftMethod.DRAFT_MODEL, model="somewhere").trains is Training.NONE
    assert DraftConfig(method=DraftMethod.DRAFT_MODEL).trains is Training.RESPONSES
    assert Draft().trains is Training.HIDDEN_STATES


def test_an_eagle3_draft_that_is_given_is_trained_further_unless_it_gets_no_steps() -> None:
    given = partial(Draft, init=DraftInit.FROM_HUB, model="somewhere")
    assert given().trains is Training.HIDDEN_STATES
    assert given(num_steps=0).trains is Training.NONE


@pytest.mark.parametrize("method", [method for method in DraftMethod if not TRAITS[method].trains_online])
def test_training_during_rl_is_refused_where_there_is_nothing_to_train(
    refusal: Callable[..., str], method: DraftMethod
) -> None:
    assert refusal(Draft, method=method, online=DraftOnline.ALWAYS) == (
        f"draft.online must be off with draft.method {method.value}, got 'always'; nothing of it is trained during RL"
    )
