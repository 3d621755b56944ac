"""The data stage of recipes of worked sums at their real sizes, and what it refuses: a later stage would fail with it.

No policy exists here: the stage has nothing but the recipe, and of a model to load its configs and tokenizer.
"""

from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError, merge
from slipstream.data.prompts import read_prompt_sets
from slipstream.data.tokenizer import build_tokenizer
from slipstream.recipe import CONFIGS, Recipe, load_recipe
from slipstream.stages.prepare_data import prepare_data
from slipstream.stages.support import recipe_prompt_sets, tokenizer
from slipstream.types import Workload
from tests.small import UNTRACKED, run_context, write_config


def read(name: str, workload: Workload | None = None, **overrides: Any) -> Recipe:
    return load_recipe(name, workload=workload, overrides={"tracking": UNTRACKED, **overrides})


def prepared(root: Path, recipe: Recipe, **given: Any) -> Path:
    return prepare_data(run_context(root), recipe, **given)


@pytest.mark.slow  # at their real sizes
@pytest.mark.parametrize("workload", list(Workload))
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("tiny*.yaml")))
def test_a_recipe_of_sums_has_the_prompts_of_its_stages(name: str, workload: Workload, tmp_path: Path) -> None:
    recipe = read(name, workload)
    data = prepared(tmp_path / "runs", recipe)
    sets = read_prompt_sets(data)
    needed = recipe.draft.pretrain.num_prompts + recipe.draft.pretrain.num_heldout_prompts
    # Either draft set serves: a recipe changes `draft.init` alone to compare them.
    assert min(len(sets.draft_in_domain), len(sets.draft_general)) >= needed
    assert len(sets.train) >= max(recipe.grpo.prompts_per_step, recipe.losslessness.num_greedy_prompts)
    assert len(sets.train) * recipe.grpo.group_size >= max(recipe.tuning.batch_sizes)
    assert len(sets.validation) == 30
    text = str(tokenizer(data / "tokenizer").decode(list(sets.validation[0].token_ids)))
    assert sets.validation[0].text in text
    assert text.endswith("<|im_start|><|assistant|>")


def test_a_model_is_refused_by_its_configs_before_any_row_is_read(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", num_layers=24, num_positions=256)
    with pytest.raises(ConfigError, match=r"engine\.max_model_len must be <= the policy's 256 positions, got 288"):
        prepared(tmp_path / "runs", read("tiny", policy={"model": str(model)}))


def test_the_tokenizer_of_another_policy_can_take_the_place_of_the_recipes(tmp_path: Path) -> None:
    draft = {"pretrain": {"num_prompts": 20, "num_heldout_prompts": 2}}
    recipe = read("tiny", data={"synthetic": {"num_draft_rows": 40}}, draft=draft)
    other = write_config(tmp_path / "model", num_layers=2, num_positions=333)
    data = prepared(tmp_path / "runs", recipe, policy=other)
    assert tokenizer(data / "tokenizer").model_max_length == 333


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"draft": {"init": "general", "pretrain": {"num_prompts": 90}}}, r"data\.draft_general, got 94"),
        ({"draft": {"method": "ngram", "pretrain": {"num_prompts": 90}}, "grpo": {"prompts_per_step": 41}}, r"^grpo"),
        ({"grpo": {"prompts_per_step": 41}}, r"^grpo\.prompts_per_step must be <= \d+, .* data\.train, got 41"),
        ({"grpo": {"prompts_per_step": 11, "dynamic_sampling": {"max_extra_batches": 3}}}, r"^\(1 \+ grpo\..* got 44"),
        ({"tuning": {"batch_sizes": [16, 328]}}, r"^tuning\.batch_sizes must be <= \d+: 8 rollouts .*train, got 328"),
        ({"losslessness": {"num_repeated_prompts": 41}}, r"^losslessness\.num_repeated_prompts must be <= .* got 41"),
        ({"losslessness": {"num_greedy_prompts": 42}}, r"^losslessness\.num_greedy_prompts must be <= .* got 42"),
    ],
)
def test_numbers_of_prompts_are_held_against_their_set(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    """40 problems of training at most, and 40 rows in each of the three draft files."""
    small = {
        "data": {"synthetic": {"num_train_problems": 40, "num_draft_rows": 40}},
        "draft": {"pretrain": {"num_prompts": 20, "num_heldout_prompts": 4}},
    }
    recipe = load_recipe("tiny", overrides=merge(small, overrides))
    with pytest.raises(ConfigError, match=message):
        recipe_prompt_sets(recipe, build_tokenizer(max_length=512))
