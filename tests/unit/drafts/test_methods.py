"""The one table that sets the methods apart, what it decides, and what vLLM is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts import methods
from slipstream.drafts.config import DraftConfig, DraftOnline
from slipstream.drafts.methods import TRAITS, DraftMethod, DraftSampling, Training, Verification, speculative_config
from tests.small import draft_with

DIRECTORY = Path("draft")
LOOKUPS = {
    "ngram": {"prompt_lookup_min": 3, "prompt_lookup_max": 4},
    "history": {"match_min": 3, "match_max": 4, "max_tokens": 5},
}
WITH_WEIGHTS = {"draft_sample_method": "probabilistic", "disable_eagle_block_drop": True}


def test_suffix_needs_its_package(refusal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert refusal(methods.require_package, method=DraftMethod.SUFFIX) == (
        "draft.method must do without the package arctic_inference, which is not here, got 'suffix'; "
        "install arctic-inference, which compiles C++, or take ngram"
    )


def test_every_method_has_traits_and_every_field_a_method_that_reads_it() -> None:
    assert set(TRAITS) == set(DraftMethod)
    read = {name for traits in TRAITS.values() for name in traits.fields}
    of_any = {"method", "length", "autopilot", "sampling", "verification"}
    assert read == {field.name for field in fields(DraftConfig)} - of_any
    for traits in TRAITS.values():  # only what has weights is trained
        assert traits.has_weights or (traits.training is Training.NONE and not traits.trains_online)


def test_what_a_method_cannot_do_is_refused(refusal: Callable[..., str]) -> None:
    looked_up = [method for method in DraftMethod if not TRAITS[method].has_weights]
    for method in (method for method in DraftMethod if not TRAITS[method].trains_online):
        assert refusal(DraftConfig, method=method, online={"when": DraftOnline.ALWAYS}) == (
            f"draft.online.when must be off with draft.method {method.value}, got 'always'; "
            "nothing of it is trained during RL"
        )
    for sampling in (DraftSampling.GREEDY, DraftSampling.AUTO):
        for method in looked_up:
            assert refusal(DraftConfig, method=method, sampling=sampling) == (
                f"draft.sampling must be left out with draft.method {method.value}, got {sampling.value!r}; "
                "its drafts are looked up, not sampled"
            )
        assert refusal(DraftConfig, verification=Verification.BLOCK, sampling=sampling) == (
            f"draft.verification must be token with draft.sampling {sampling.value}, got 'block'; "
            "blocks accept no more of greedy drafts"
        )
    assert refusal(DraftConfig, method=DraftMethod.NGRAM, verification=Verification.BLOCK) == (
        "draft.verification must be token with draft.method ngram, got 'block'; its drafts have no probabilities"
    )


@pytest.mark.parametrize(
    ("config", "draft", "told"),
    [
        *(
            (DraftConfig(method=DraftMethod(name)), DIRECTORY, {"method": name, "model": "draft", **WITH_WEIGHTS})
            for name in ("eagle3", "dflash", "mtp", "draft_model")
        ),
        *((draft_with(method=name, **{name: own}), None, {"method": name, **own}) for name, own in LOOKUPS.items()),
    ],
)
def test_vllm_is_told_the_method_and_rejects_by_the_standard_rule(
    config: DraftConfig, draft: Path | None, told: Any
) -> None:
    assert speculative_config(config, draft, 2) == {
        **told,
        "num_speculative_tokens": 2,
        "rejection_sample_method": "standard",
    }


def test_vllm_is_told_of_blocks_and_of_greedy_drafts() -> None:
    by_block = DraftConfig(verification=Verification.BLOCK)
    assert speculative_config(by_block, DIRECTORY, 2)["rejection_sample_method"] == "block"
    for method in (method for method in DraftMethod if TRAITS[method].has_weights):
        greedy = DraftConfig(method=method, sampling=DraftSampling.GREEDY)
        assert speculative_config(greedy, DIRECTORY, 2)["draft_sample_method"] == "greedy"


def test_an_engine_needs_the_choice_that_tuning_makes_and_tokens(refusal: Callable[..., str]) -> None:
    ask = partial(speculative_config, draft=DIRECTORY)
    assert refusal(ask, config=DraftConfig(sampling=DraftSampling.AUTO), num_speculative_tokens=2) == (
        "draft.sampling must be probabilistic or greedy where no draft length is tuned, got 'auto'; "
        "tuning alone compares the two"
    )
    none = refusal(ask, config=DraftConfig(), num_speculative_tokens=0)
    assert none == "num_speculative_tokens must be >= 1, got 0"


def test_vllm_is_told_how_much_a_suffix_tree_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "arctic_inference").mkdir()
    (tmp_path / "arctic_inference" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    own = {"max_tree_depth": 12, "max_cached_requests": 34, "max_spec_factor": 1.5, "min_token_prob": 0.25}
    assert speculative_config(draft_with(method=DraftMethod.SUFFIX, suffix=own), None, 7) == {
        "method": "suffix",
        "num_speculative_tokens": 7,
        "rejection_sample_method": "standard",
        **{f"suffix_decoding_{name}": value for name, value in own.items()},
    }


@pytest.mark.parametrize("method", DraftMethod)
def test_a_draft_directory_is_given_exactly_where_a_method_has_weights_of_its_own(method: DraftMethod) -> None:
    with pytest.raises(AssertionError, match="with draft"):
        speculative_config(DraftConfig(method=method), None if TRAITS[method].has_weights else DIRECTORY, 1)
