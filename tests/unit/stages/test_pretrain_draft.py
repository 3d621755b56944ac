"""What pretraining makes of each method: a draft that is taught, one that is given, and none at all."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from slipstream.config import ConfigError
from slipstream.data.tokenizer import write_tokenizer
from slipstream.drafts.config import DraftInit
from slipstream.drafts.trainer import DraftTrainer
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import read_record
from slipstream.records.stages import DraftRecord
from slipstream.stages import pretrain_draft as stage
from slipstream.stages.recipe_engines import draft_weights
from slipstream.stages.store import draft_key
from tests.small import draft_with, replace_in, run_context
from tests.unit.drafts.small import model
from tests.unit.recipe_fields.base import PROMPTS, NotedEngine, recipe_with
from tests.unit.recipe_fields.draft import DraftLearner
from tests.unit.recipe_fields.policy import own_policy

TEMPERATURE = 0.5


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tags of the runs that would have been opened; nothing may start a process."""
    tags: list[Any] = []
    replace_in(monkeypatch, stage, tracked=lambda context, recipe, node, given: tags.append(given) or nullcontext())
    replace_in(monkeypatch, stage, settled=lambda context, recipe: recipe)
    for name in ("connect", "start_engine", "start_learner"):
        monkeypatch.setattr(stage, name, lambda *arguments, **more: pytest.fail("nothing is to start"))
    return tags


def made(root: Path, policy: Path, **draft: Any) -> tuple[Recipe, Path]:
    recipe = load_recipe("tiny", overrides={"draft": draft})
    return recipe, stage.pretrain_draft(run_context(root / "runs"), recipe, policy=policy, data=root)


def train_on(
    recipe: Recipe, policy: Path, directory: Path, on_step: Callable[[int, float], None] = lambda step, loss: None
) -> DraftRecord:
    return stage.train_on(PROMPTS, recipe, policy=policy, directory=directory, on_step=on_step)


def test_what_is_looked_up_is_written_down_and_handed_on_without_weights(tmp_path: Path, untracked: list[Any]) -> None:
    recipe, directory = made(tmp_path, tmp_path, method="ngram")
    record = read_record(DraftRecord, directory / "draft.json")
    assert (record.method, record.init, record.num_parameters, record.num_steps) == ("ngram", "none", 0, 0)
    assert (record.losses, record.heldout_rate_by_position, record.heldout_mean_acceptance_length) == ((), (), None)
    assert untracked == [{"draft.init": "none"}]
    assert draft_weights(recipe.draft, directory) is None


def test_a_given_draft_model_is_linked_if_it_has_the_policys_vocabulary(tmp_path: Path, untracked: list[Any]) -> None:
    policy, small = model(tmp_path / "policy"), model(tmp_path / "small")
    recipe, directory = made(tmp_path, policy, method="draft_model", model=str(small))
    assert read_record(DraftRecord, directory / "draft.json").num_parameters == 6
    weights = draft_weights(recipe.draft, directory)
    assert weights is not None and weights == directory / "draft"
    assert (weights / "model.safetensors").resolve() == small / "model.safetensors"
    other = model(tmp_path / "other", vocab_size=63)
    with pytest.raises(ConfigError, match=r"draft.model vocab_size must equal the policy's 64, got 63"):
        made(tmp_path / "again", policy, method="draft_model", model=str(other))


class Learner(DraftLearner):
    """Notes what it is asked; its policy gives every token 1/2, what it makes afterwards 1/4."""

    probability = 0.5

    def create(self, scratch: Any, vocab_size: int, eos: int, optimizer: Any) -> int:
        self.calls.append(("create", [scratch.shape.hidden_size, vocab_size, eos, optimizer.method.value]))
        self.probability = 0.25
        return 9

    def logprobs(self, batch: Any, temperature: float) -> list[np.ndarray]:
        self.calls.append(("logprobs", [len(batch.token_ids), temperature]))
        lengths = [len(tokens) - start for tokens, start in zip(batch.token_ids, batch.prompt_lengths, strict=True)]
        return [np.full(length, np.log(self.probability), dtype=np.float32) for length in lengths]

    def lm_step(self, *_: Any, learning_rate: float) -> float:
        self.calls.append(("lm_step", []))
        return 2.0


def test_a_small_model_learns_answers_and_is_judged_as_they_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, learner = NotedEngine(), Learner()
    replace_in(monkeypatch, stage, start_engine=lambda policy, config, layout: nullcontext(engine))
    replace_in(monkeypatch, stage, start_learner=lambda config, layout: nullcontext(learner))
    changes = {"draft.method": "draft_model", "draft.pretrain.ttt_steps": 1, "sampling.temperature": TEMPERATURE}
    told: list[int] = []
    policy, directory, step = model(tmp_path / "policy"), tmp_path / "draft_of", ("lm_step", [])
    record = train_on(recipe_with(changes), policy, directory, lambda step, _: told.append(step))
    assert told == [0, 1, 2, 3]
    judging, checkpoint = ("logprobs", [2, TEMPERATURE]), directory / "checkpoint" / "step-2"
    assert learner.calls == [
        *(("load", [policy, None]), judging, ("create", [64, 64, 3, "muon"])),
        *(step, step, ("save_checkpoint", [checkpoint, {}]), ("finish_checkpoint", []), step, step),
        *(judging, ("save_hf", [directory / "draft", policy])),
    ]
    assert (record.method, record.init, record.num_parameters) == ("draft_model", "in_domain", 9)
    assert record.losses == (2.0,) * 4
    assert record.heldout_rate_by_position == pytest.approx((0.5,))  # a quarter over a half
    assert record.heldout_mean_acceptance_length == pytest.approx(1.5)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Recipe, Path, Path]:
    """A recipe, a policy, and a draft that somebody else has trained for it."""
    recipe = recipe_with({})
    write_tokenizer(tmp_path / "tokenizer", max_length=64)
    own_policy(recipe).save_hf(tmp_path / "policy", tmp_path / "tokenizer")
    DraftTrainer(tmp_path / "policy", recipe.draft).save(tmp_path / "given")
    return recipe, tmp_path / "policy", tmp_path / "given"


def _with(recipe: Recipe, given: Path, **values: Any) -> Recipe:
    return replace(recipe, draft=draft_with(recipe.draft, init=DraftInit.FROM_HUB, model=str(given), pretrain=values))


def test_a_given_draft_without_steps_is_handed_on_unchanged(models: tuple[Recipe, Path, Path], tmp_path: Path) -> None:
    recipe, policy, given = models
    config, directory = _with(recipe, given, num_steps=0).draft, tmp_path / "taken"
    taken = stage._take_weights(config, policy, directory, max_model_len=recipe.engine.max_model_len)
    assert (directory / "model.safetensors").read_bytes() == (given / "model.safetensors").read_bytes()
    assert taken == sum(tensor.numel() for tensor in load_file(given / "model.safetensors").values())


def test_a_given_draft_with_steps_is_what_the_learner_starts_from(
    models: tuple[Recipe, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe, policy, given), learner, directory = models, DraftLearner(), tmp_path / "stage"
    replace_in(monkeypatch, stage, start_engine=lambda policy, config, layout: nullcontext(NotedEngine()))
    replace_in(monkeypatch, stage, start_learner=lambda config, layout: nullcontext(learner))
    directory.mkdir()
    record = train_on(_with(recipe, given, ttt_steps=1), policy, directory)
    (start,) = [arguments for name, arguments in learner.calls if name == "start_draft"]
    assert start == [policy, directory / "given", None]
    assert (directory / "given" / "model.safetensors").read_bytes() == (given / "model.safetensors").read_bytes()
    assert (record.init, record.num_steps) == ("from_hub", 4)


def test_a_given_draft_that_does_not_fit_is_refused_before_an_engine_starts(
    models: tuple[Recipe, Path, Path], tmp_path: Path, untracked: list[Any]
) -> None:
    recipe, policy, given = models
    settings = json.loads((given / "config.json").read_text())
    settings["transformer_layer_config"]["max_position_embeddings"] = 8
    (given / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"draft max_position_embeddings must be >= engine\.max_model_len"):
        train_on(_with(recipe, given), policy, tmp_path)


def test_answers_that_are_too_short_to_draft_for_are_refused_before_a_learner_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untracked: list[Any]
) -> None:
    replace_in(monkeypatch, stage, start_engine=lambda policy, config, layout: nullcontext(NotedEngine()))
    with pytest.raises(ConfigError, match=r"ttt_steps must leave a held-out response of more than 2 tokens, got 2"):
        train_on(recipe_with({"draft.pretrain.ttt_steps": 2}), tmp_path, tmp_path)


def test_the_content_of_a_given_draft_is_part_of_the_key(models: tuple[Recipe, Path, Path]) -> None:
    recipe, _, given = models
    recipe = _with(recipe, given)
    key = draft_key(recipe, policy="p", data="d")
    assert draft_key(recipe, policy="p", data="d") == key
    (given / "config.json").write_text("{}")
    assert draft_key(recipe, policy="p", data="d") != key
