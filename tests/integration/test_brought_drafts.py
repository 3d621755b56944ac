"""A draft of a cut vocabulary, trained by the real learner on the real engine's answers, and brought to another run.

The policy beside the draft trains adapters, whose merged weights the engine gets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from slipstream.config import merge
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.stages import DraftRecord
from slipstream.stages.pretrain_draft import train_on
from tests import small
from tests.small import prompts, train_arm

pytestmark = pytest.mark.slow

STEPS, KNOWN = 2, 24
PRETRAIN = {"num_prompts": 24, "num_heldout_prompts": 8, "num_steps": 12, "tokens_per_step": 256}
RECIPE: dict[str, Any] = {
    "sampling": {"max_response_tokens": 12, "temperature": 0.8},
    "engine": {"max_num_seqs": 32},
    "learner": {"num_kept_idle": 0},
    "draft": {
        "pretrain": {**PRETRAIN, "optimizer": {"warmup_steps": 1}},
        "eagle3": {"vocab_size": KNOWN, "fc_norm": True, "norm_output": True},
    },
    "policy": {"scratch": None},
    "grpo": {"num_steps": STEPS, "prompts_per_step": 4},
    "refit": {"check_every_steps": 1},
    "simulator": None,
}
ADAPTERS: dict[str, Any] = {
    "policy": {"lora": {"rank": 4}},
    "grpo": {"optimizer": {"method": "adamw", "learning_rate": 1e-2}, "loss": {"kl_coefficient": 0.1}},
}
PROMPTS = prompts((2, 4 + i % 16, 20 + i // 16, 30 + i) for i in range(32))


def _recipe(policy: Path, changes: dict[str, Any] | None = None) -> Recipe:
    given = merge({"policy": {"model": str(policy)}}, changes or {})
    return load_recipe("tiny", overrides=merge(merge(small.RECIPE, RECIPE), given))


def _pretrained(recipe: Recipe, policy: Path, directory: Path) -> DraftRecord:
    directory.mkdir()
    return train_on(PROMPTS, recipe, policy=policy, directory=directory, on_step=lambda step, loss: None)


def test_a_cut_draft_is_trained_used_through_refits_and_brought_to_another_run(
    tmp_path: Path, policy: Path, ray_session: None
) -> None:
    recipe = _recipe(policy)
    first = _pretrained(recipe, policy, tmp_path / "first")
    draft = tmp_path / "first" / "draft"
    tensors = load_file(draft / "model.safetensors")
    assert tensors["d2t"].shape == (KNOWN,)
    assert {f"fc_norm.{index}.weight" for index in range(3)} <= tensors.keys()
    assert first.losses[-1] < first.losses[0]
    adapted = _recipe(policy, ADAPTERS)
    steps = train_arm(adapted, policy, tmp_path / "arm", prompts=PROMPTS[:8], k=2, draft=draft).steps
    assert [step.acceptance is not None for step in steps] == [True] * STEPS
    assert all(step.acceptance.mean_acceptance_length > 1.0 for step in steps if step.acceptance is not None)
    assert all(step.mismatch.mean < 1e-4 for step in steps), "the engine's policy is the merged one"
    assert steps[0].train.kl == 0.0 < steps[1].train.kl, "the reference is the policy below the adapters"
    assert (tmp_path / "arm" / "policy" / "adapter" / "adapter_model.safetensors").is_file()

    changes = {"init": "from_hub", "model": str(draft), "pretrain": {"num_steps": 4}, "eagle3": {"vocab_size": None}}
    brought = _recipe(policy, {"draft": changes})
    second = _pretrained(brought, policy, tmp_path / "second")
    assert second.init == "from_hub"
    assert second.losses[0] < first.losses[0], "it begins where the other ended"
    assert load_file(tmp_path / "second" / "draft" / "model.safetensors")["d2t"].shape == (KNOWN,)
