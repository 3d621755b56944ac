"""What pretraining makes of each method: a draft that is taught, one that is given, and none at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config import ConfigError
from slipstream.grpo.config import DynamicSamplingConfig
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import read_record
from slipstream.records.stages import DraftRecord
from slipstream.stages import pretrain_draft as stage
from slipstream.stages.context import RunContext
from slipstream.stages.pretrain_draft import pretrain_draft, train_on
from slipstream.stages.recipe_engines import draft_weights
from tests.unit.drafts.small import model
from tests.unit.recipe_fields.base import PROMPTS, NotedEngine, recipe_with

TEMPERATURE = 0.5


def recipe_of(**draft: Any) -> Recipe:
    return load_recipe("tiny", overrides={"draft": draft})


def context_of(tmp_path: Path) -> RunContext:
    return RunContext(execution="e", root=str(tmp_path / "runs"), experiment="x", workload="rl_zero")


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tags of the runs that would have been opened; nothing may start a process."""
    tags: list[Any] = []
    monkeypatch.setattr(stage, "tracked", lambda context, recipe, node, given: tags.append(given) or nullcontext())
    monkeypatch.setattr(stage, "settled", lambda context, recipe: recipe)
    for name in ("connect", "start_engine", "start_learner"):
        monkeypatch.setattr(stage, name, lambda *arguments, **more: pytest.fail("nothing is to start"))
    return tags


def test_what_is_looked_up_is_written_down_and_handed_on_without_weights(tmp_path: Path, untracked: list[Any]) -> None:
    recipe = recipe_of(method="ngram")
    made = pretrain_draft(context_of(tmp_path), recipe, policy=tmp_path, data=tmp_path)
    record = read_record(DraftRecord, made / "draft.json")
    assert (record.method, record.init, record.num_parameters, record.num_steps) == ("ngram", "none", 0, 0)
    assert (record.losses, record.heldout_rate_by_position, record.heldout_mean_acceptance_length) == ((), (), None)
    assert untracked == [{"draft.init": "none"}]
    assert draft_weights(recipe.draft, made) is None


def test_a_draft_model_that_is_given_is_linked(tmp_path: Path, untracked: list[Any]) -> None:
    policy, small = model(tmp_path / "policy"), model(tmp_path / "small")
    recipe = recipe_of(method="draft_model", model=str(small))
    made = pretrain_draft(context_of(tmp_path), recipe, policy=policy, data=tmp_path)
    assert read_record(DraftRecord, made / "draft.json").num_parameters == 6
    weights = draft_weights(recipe.draft, made)
    assert weights is not None and weights == made / "draft"
    assert (weights / "model.safetensors").resolve() == small / "model.safetensors"


def test_a_draft_model_of_another_vocabulary_is_refused_before_anything_starts(
    tmp_path: Path, untracked: list[Any]
) -> None:
    policy, small = model(tmp_path / "policy"), model(tmp_path / "small", vocab_size=63)
    recipe = recipe_of(method="draft_model", model=str(small))
    with pytest.raises(ConfigError, match=r"draft.model vocab_size must equal the policy's 64, got 63"):
        pretrain_draft(context_of(tmp_path), recipe, policy=policy, data=tmp_path)


class Learner:
    """Notes what it is asked; its policy gives every token 1/2, what it makes afterwards 1/4."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.probability = 0.5

    def load(self, policy: Path, optimizer: Any) -> int:
        self.calls.append(("load", policy.name, optimizer))
        return 100

    def create(self, scratch: Any, vocab_size: int, eos: int, optimizer: Any) -> int:
        self.calls.append(("create", scratch.shape.hidden_size, vocab_size, eos, optimizer.method.value))
        self.probability = 0.25
        return 9

    def logprobs(self, batch: Any, temperature: float) -> list[np.ndarray]:
        self.calls.append(("logprobs", len(batch.token_ids), temperature))
        lengths = [len(tokens) - start for tokens, start in zip(batch.token_ids, batch.prompt_lengths, strict=True)]
        return [np.full(length, np.log(self.probability), dtype=np.float32) for length in lengths]

    def lm_step(
        self, sequences: Sequence[Any], loss_starts: Sequence[int], *, learning_rate: float | None = None
    ) -> float:
        self.calls.append("lm_step")
        return 2.0

    def save_checkpoint(self, path: Path, extra: Any) -> None:
        self.calls.append(("checkpoint", path.name))

    def finish_checkpoint(self) -> None:
        pass

    def load_checkpoint(self, path: Path) -> None:
        pytest.fail("no attempt came before")

    def save_hf(self, path: Path, tokenizer: Path) -> None:
        self.calls.append(("save", path.name, tokenizer.name))


def test_a_small_model_learns_the_policys_answers_and_is_judged_at_the_sampling_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, learner = NotedEngine(), Learner()
    monkeypatch.setattr(stage, "start_engine", lambda policy, config, layout: nullcontext(engine))
    monkeypatch.setattr(stage, "start_learner", lambda config, layout: nullcontext(learner))
    changes = {"draft.method": "draft_model", "draft.pretrain.ttt_steps": 1, "sampling.temperature": TEMPERATURE}
    policy, directory = model(tmp_path / "policy"), tmp_path / "draft_of"
    told: list[int] = []
    record = train_on(
        PROMPTS, recipe_with(changes), policy=policy, directory=directory, on_step=lambda step, loss: told.append(step)
    )
    assert told == [0, 1, 2, 3]
    assert learner.calls == [
        ("load", "policy", None),
        ("logprobs", 2, TEMPERATURE),
        ("create", 64, 64, 3, "muon"),
        "lm_step",
        "lm_step",
        ("checkpoint", "step-2"),
        "lm_step",
        "lm_step",
        ("logprobs", 2, TEMPERATURE),
        ("save", "draft", "policy"),
    ]
    assert (record.method, record.init, record.num_parameters) == ("draft_model", "in_domain", 9)
    assert record.losses == (2.0,) * 4
    assert record.heldout_rate_by_position == pytest.approx((0.5,))  # a quarter over a half
    assert record.heldout_mean_acceptance_length == pytest.approx(1.5)


def test_prompts_must_suffice_for_what_is_trained_and_for_the_further_batches_of_a_step(
    refusal: Callable[..., str],
) -> None:
    from slipstream.data.prompts import PromptSets
    from slipstream.stages.support import require_prompts

    recipe = recipe_with({"losslessness.num_repeated_prompts": 1, "losslessness.num_greedy_prompts": 1})
    sets = PromptSets(train=PROMPTS[:6], draft_in_domain=(), draft_general=(), validation=PROMPTS[6:], records=())
    assert "draft.pretrain.num_prompts + num_heldout_prompts" in refusal(require_prompts, recipe=recipe, sets=sets)
    ngram = recipe_with(
        {"draft.method": "ngram", "losslessness.num_repeated_prompts": 1, "losslessness.num_greedy_prompts": 1}
    )
    require_prompts(ngram, sets)
    extra = "grpo.dynamic_sampling.max_extra_batches"
    all_6, more = (
        replace(ngram, grpo=replace(ngram.grpo, dynamic_sampling=DynamicSamplingConfig(max_extra_batches=num)))
        for num in (2, 3)
    )
    require_prompts(all_6, sets)
    expected = (
        f"(1 + {extra}) x grpo.prompts_per_step must be <= 6, the number of distinct prompts in data.train, got 8"
    )
    assert refusal(require_prompts, recipe=more, sets=sets).startswith(expected)
