"""GRPO on a mixture of experts: dealt to two ranks or on one, it is the same training, of the real loop and engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import merge
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.steps import StepRecord
from slipstream.types import Prompt
from tests import small
from tests.integration import qwen3_moe
from tests.small import train_arm

pytestmark = pytest.mark.slow

STEPS = 2
RECIPE: dict[str, Any] = {
    "sampling": {"max_response_tokens": 12},
    "engine": {"max_num_seqs": 32},
    "learner": {"num_kept_idle": 0},
    "policy": {"scratch": None},
    "grpo": {"num_steps": STEPS, "prompts_per_step": 4, "optimizer": {"method": "adamw", "learning_rate": 1e-3}},
    "refit": {"check_every_steps": 1},
    "simulator": None,
}
LEARNERS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "experts dealt to two": {"learner": {"parallel": {"data": 2, "expert": 2}}},
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> dict[str, Sequence[StepRecord]]:
    """Steps of the speculative arm, by where the experts are."""
    from slipstream.data.tokenizer import write_tokenizer
    from slipstream.drafts.eagle3 import build_draft, save_draft

    directory = tmp_path_factory.mktemp("experts")
    policy, draft = directory / "policy", directory / "draft"
    qwen3_moe.write_model(policy, seed=0)
    write_tokenizer(policy, max_length=128)
    save_draft(build_draft(policy, _recipe(policy, {}).draft), draft)
    prompts = [Prompt(id=str(i), text="", token_ids=(2, 10 + i, 20, 30 + i), answer="1") for i in range(8)]
    how: dict[str, Any] = {"prompts": prompts, "k": 2, "draft": draft}
    recipes = {name: _recipe(policy, where) for name, where in LEARNERS.items()}
    return {name: train_arm(recipe, policy, directory / name, **how).steps for name, recipe in recipes.items()}


def _recipe(policy: Path, where: dict[str, Any]) -> Recipe:
    return load_recipe(
        "tiny", overrides=merge(merge(merge(small.RECIPE, RECIPE), where), {"policy": {"model": str(policy)}})
    )


def test_training_with_dealt_experts_is_that_of_one_rank(steps: dict[str, Sequence[StepRecord]]) -> None:
    alone, dealt = steps["one rank"], steps["experts dealt to two"]
    assert len(alone) == len(dealt) == STEPS
    assert all(step.train.grad_norm > 0 for step in alone), "every step must have learned something"
    for ours, theirs in zip(dealt, alone, strict=True):
        assert ours.reward_mean == theirs.reward_mean
        assert ours.num_response_tokens == theirs.num_response_tokens
        assert ours.train.loss == pytest.approx(theirs.train.loss, rel=1e-4, abs=1e-6)
        assert ours.train.grad_norm == pytest.approx(theirs.train.grad_norm, rel=1e-4)
        assert ours.train.entropy == pytest.approx(theirs.train.entropy, rel=1e-4)


def test_learner_and_engine_agree_about_the_experts_choices(steps: dict[str, Sequence[StepRecord]]) -> None:
    for step in steps["experts dealt to two"]:
        assert step.mismatch.mean < 1e-4
        assert step.refit.num_tensors > 3 * 8 * 2  # every expert's, and the draft's
