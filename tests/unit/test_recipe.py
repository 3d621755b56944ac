"""A recipe is refused as a whole before anything starts, with a message that says how to fix it."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.recipe import CONFIGS, load_recipe, write_recipe
from slipstream.types import Workload


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("workload", list(Workload))
def test_every_shipped_recipe_is_valid_and_survives_writing(path: Path, workload: Workload, tmp_path: Path) -> None:
    recipe = load_recipe(path.stem, workload=workload)
    assert recipe.workload is workload
    assert load_recipe(str(write_recipe(recipe, tmp_path / "recipe.yaml"))) == recipe


def test_an_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"recipe must name a recipe file, got 'tinny'; known recipes: .*tiny"):
        load_recipe("tinny")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"grpo": {"group_sise": 4}}, r"unknown recipe key 'grpo.group_sise'; did you mean 'grpo.group_size'"),
        ({"grpo": {"group_size": 1}}, r"grpo.group_size must be >= 2, got 1"),
        (
            {"engine": {"max_model_len": 224}},
            r"engine.max_model_len must hold data.max_prompt_tokens 64 \+ sampling.max_response_tokens 160 \+ k 7 \+ 1",
        ),
        ({"engine": {"max_model_len": 1024}}, r"must be <= policy.scratch.max_position_embeddings 512, got 1024"),
        (
            {"engine": {"kv_cache_gib": None}},
            r"engine.gpu_memory_utilization must be at most 0.95 / tuning.max_live_engines 6, got 0.6",
        ),
        (
            {"learner": {"parallel": {"tensor": 2}}},
            r"learner.parallel.tensor must be 1 with the optimizer 'muon', got 2; .* take adamw",
        ),
        ({"sampling": {"top_p": 0.9}}, r"sampling.top_p and sampling.top_k must leave the policy's distribution whole"),
        ({"sampling": {"temperature": 0.0}}, r"sampling.temperature must be > 0 for training"),
        ({"learner": {"max_tokens_per_microbatch": 100}}, r"must hold one whole sequence of 224 tokens, got 100"),
        (
            {"draft": {"aux_hidden_state_layer_ids": [2, 2, 21]}},
            r"draft.aux_hidden_state_layer_ids must be three different layers",
        ),
        ({"draft": {"aux_hidden_state_layer_ids": [2, 12, 24]}}, r"must be < policy.scratch.num_layers 24"),
    ],
)
def test_a_broken_rule_names_field_rule_and_value(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("tiny", overrides=overrides)
