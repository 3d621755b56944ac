"""GRPO on a mixture of experts: dealt to two ranks or on one, it is the same training, of the real loop and engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import merge
from slipstream.drafts.methods import speculative_config
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.steps import StepRecord
from slipstream.types import Arm, Prompt
from tests.integration import qwen3_moe

pytestmark = pytest.mark.slow

K, STEPS = 2, 2
RECIPE: dict[str, Any] = {
    "sampling": {"max_response_tokens": 12},
    "evaluation": {"max_response_tokens": 12},
    "tuning": {"candidate_ks": [0, K]},
    "engine": {
        "max_model_len": 128,
        "max_num_seqs": 32,
        "kv_cache_gib": 0.1,
        "dtype": "float32",
        "num_threads": 1,
        "num_kept_idle": 1,
    },
    "learner": {"max_tokens_per_microbatch": 128, "dtype": "float32", "num_threads": 1},
    "draft": {"aux_hidden_state_layer_ids": [0, 1, 2]},
    "policy": {"scratch": None},
    "grpo": {
        "num_steps": STEPS,
        "prompts_per_step": 4,
        "group_size": 4,
        "checkpoint_every_steps": STEPS,
        "optimizer": {"method": "adamw", "learning_rate": 1e-3},
    },
    "refit": {"check_every_steps": 1},
    "simulator": None,
}
LEARNERS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "experts dealt to two": {"learner": {"parallel": {"data": 2, "expert": 2}}},
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> dict[str, Sequence[StepRecord]]:
    """Of the speculative arm, by where the experts are."""
    from slipstream.data.tokenizer import write_tokenizer
    from slipstream.drafts.eagle3 import build_draft, save_draft

    directory = tmp_path_factory.mktemp("experts")
    policy, draft = directory / "policy", directory / "draft"
    qwen3_moe.write_model(policy, seed=0)
    write_tokenizer(policy, max_length=128)
    save_draft(build_draft(policy, _recipe(policy, {}).draft), draft)
    return {name: _trained(where, policy, draft, directory / name) for name, where in LEARNERS.items()}


def _recipe(policy: Path, where: dict[str, Any]) -> Recipe:
    return load_recipe("tiny", overrides=merge(merge(RECIPE, where), {"policy": {"model": str(policy)}}))


def _trained(where: dict[str, Any], policy: Path, draft: Path, directory: Path) -> Sequence[StepRecord]:
    from slipstream.train.arm import ArmPlan, train
    from slipstream.workers.engines import start_engine

    recipe = _recipe(policy, where)
    speculative = speculative_config(recipe.draft, draft, K)
    plan = ArmPlan(
        arm=Arm.SPECULATIVE,
        num_speculative_tokens=K,
        draft=draft,
        start_engine=lambda: start_engine(
            policy, config=recipe.engine, speculative_config=speculative, layout=recipe.layout
        ),
    )
    prompts = [Prompt(id=str(i), text="", token_ids=(2, 10 + i, 20, 30 + i), answer="1") for i in range(8)]
    record = train(
        recipe,
        plan,
        policy=policy,
        prompts=prompts,
        decode=lambda prompt, ids: "\\boxed{1}" if sum(ids) % 2 else "",  # right for about half of what is said
        directory=directory,
        log=lambda metrics, step: None,
    )
    return record.steps


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
