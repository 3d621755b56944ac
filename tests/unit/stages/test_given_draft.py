"""A draft that somebody else has trained, through the stage: taken as it is, or the learner's start."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from slipstream.config import ConfigError
from slipstream.data.tokenizer import write_tokenizer
from slipstream.drafts.config import DraftInit
from slipstream.drafts.trainer import DraftTrainer
from slipstream.recipe import Recipe
from slipstream.stages import pretrain_draft as stage
from slipstream.stages.store import draft_key
from tests.small import draft_with
from tests.unit.recipe_fields.base import PROMPTS, NotedEngine, recipe_with
from tests.unit.recipe_fields.draft import DraftLearner
from tests.unit.recipe_fields.policy import own_policy


@pytest.fixture
def models(tmp_path: Path) -> tuple[Recipe, Path, Path]:
    recipe = recipe_with({})
    write_tokenizer(tmp_path / "tokenizer", max_length=64)
    own_policy(recipe).save_hf(tmp_path / "policy", tmp_path / "tokenizer")
    DraftTrainer(tmp_path / "policy", recipe.draft).save(tmp_path / "given")
    return recipe, tmp_path / "policy", tmp_path / "given"


def _with(recipe: Recipe, given: Path, **values: Any) -> Recipe:
    draft = draft_with(recipe.draft, init=DraftInit.FROM_HUB, model=str(given), pretrain=values)
    return replace(recipe, draft=draft)


def test_a_given_draft_without_steps_is_handed_on_unchanged(models: tuple[Recipe, Path, Path], tmp_path: Path) -> None:
    recipe, policy, given = models
    config = _with(recipe, given, num_steps=0).draft
    taken = stage._take_weights(config, policy, tmp_path / "taken", max_model_len=recipe.engine.max_model_len)
    assert (tmp_path / "taken" / "model.safetensors").read_bytes() == (given / "model.safetensors").read_bytes()
    assert taken == sum(tensor.numel() for tensor in load_file(given / "model.safetensors").values())


def test_a_given_draft_with_steps_is_what_the_learner_starts_from(
    models: tuple[Recipe, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, policy, given = models
    learner = DraftLearner()
    monkeypatch.setattr(stage, "start_engine", lambda policy, config, layout: nullcontext(NotedEngine()))
    monkeypatch.setattr(stage, "start_learner", lambda config, layout: nullcontext(learner))
    directory = tmp_path / "stage"
    directory.mkdir()
    record = stage.train_on(
        PROMPTS, _with(recipe, given), policy=policy, directory=directory, on_step=lambda step, loss: None
    )
    (start,) = [arguments for name, arguments in learner.calls if name == "start_draft"]
    assert start == [policy, directory / "given", None]
    assert (directory / "given" / "model.safetensors").read_bytes() == (given / "model.safetensors").read_bytes()
    assert (record.init, record.num_steps) == ("from_hub", 4)


def test_a_given_draft_that_does_not_fit_is_refused_before_an_engine_starts(
    models: tuple[Recipe, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, policy, given = models
    settings = json.loads((given / "config.json").read_text())
    settings["transformer_layer_config"]["max_position_embeddings"] = 8
    (given / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(stage, "start_engine", lambda *_, **__: pytest.fail("no engine may start"))
    with pytest.raises(ConfigError, match=r"draft max_position_embeddings must be >= engine\.max_model_len"):
        stage.train_on(
            PROMPTS, _with(recipe, given), policy=policy, directory=tmp_path, on_step=lambda step, loss: None
        )


def test_the_content_of_a_given_draft_is_part_of_the_key(models: tuple[Recipe, Path, Path], tmp_path: Path) -> None:
    recipe, _, given = models
    other = tmp_path / "other"
    shutil.copytree(given, other)
    recipe = _with(recipe, given)
    key = draft_key(recipe, policy="p", data="d")
    assert draft_key(recipe, policy="p", data="d") == key
    (given / "config.json").write_text("{}")
    assert draft_key(recipe, policy="p", data="d") != key
