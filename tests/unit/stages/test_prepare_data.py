"""The data stage of every recipe at its real size, and that it refuses prompts that a later stage would find too few.

No policy exists here: the stage has nothing but the recipe, and of a model to load its configs and tokenizer.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError, merge
from slipstream.data.config import SourceConfig
from slipstream.data.prompts import read_prompt_sets
from slipstream.data.tokenizer import build_tokenizer
from slipstream.learner.config import ParallelConfig
from slipstream.recipe import CONFIGS, Recipe, load_recipe
from slipstream.stages.prepare_data import prepare_data
from slipstream.stages.support import recipe_prompt_sets, tokenizer
from slipstream.types import Workload
from slipstream.workers.placement.config import PlacementConfig
from tests.small import UNTRACKED, draft_with, run_context, write_config


def read(name: str, workload: Workload | None = None, **overrides: Any) -> Recipe:
    return load_recipe(name, workload=workload, overrides={"tracking": UNTRACKED, **overrides})


def prepared(root: Path, recipe: Recipe, **given: Any) -> Path:
    return prepare_data(run_context(root), recipe, **given)


def on_local_files(recipe: Recipe, directory: Path) -> Recipe:
    """`recipe` without a hub: files of the hub sets' columns, and a draft as much smaller as they are.

    The tests have no network, and the real sets have tens of thousands of rows; the columns, the filters and all
    other numbers of the recipe are the real ones.
    """

    def rows(name: str, rows: list[dict[str, Any]]) -> tuple[SourceConfig, ...]:
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return (SourceConfig(path=str(path)),)

    def user(content: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": content}]

    def dapo(i: int) -> dict[str, Any]:
        return {"prompt": user(f"{i}+1=?"), "reward_model": {"ground_truth": str(i + 1)}}

    def open_r1(i: int) -> dict[str, Any]:
        return {"prompt": f"{i}+2=?", "solution": str(i + 2), "source_prompt": user("")}

    chats = [{"prompt": "", "prompt_id": "", "messages": user(f"say {i}")} for i in range(15)]
    magpie = [{"conversations": [{"from": "human", "value": f"tell {i}"}]} for i in range(15)]
    data = replace(
        recipe.data,
        train=rows("dapo", [dapo(i) for i in range(140)]),
        draft_in_domain=rows("open_r1", [open_r1(i) for i in range(30)]),
        draft_general=(*rows("ultrachat", chats), *rows("magpie", magpie)),
        validation=rows("aime", [{"problem": f"{i}+3=?", "answer": str(i + 3)} for i in range(30)]),
        system=None,
        examples=(),  # with a token a character they are too long
    )
    source = write_config(directory / "model", num_layers=4, num_positions=recipe.engine.max_model_len)
    draft = draft_with(recipe.draft, pretrain={"num_prompts": 24, "num_heldout_prompts": 6})
    return replace(with_model(recipe, source), data=data, draft=draft)


def with_model(recipe: Recipe, source: Path) -> Recipe:
    """The recipe with a local model, which is too small to be split over GPUs."""
    return replace(
        recipe,
        policy=replace(recipe.policy, model=str(source)),
        learner=replace(recipe.learner, parallel=ParallelConfig()),
        engine=replace(recipe.engine, num_engines=1, kv_cache_gib=1.0),
        placement=PlacementConfig(),
    )


@pytest.mark.slow  # at their real sizes
@pytest.mark.parametrize("workload", list(Workload))
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_recipe_has_the_prompts_of_its_stages(name: str, workload: Workload, tmp_path: Path) -> None:
    recipe = read(name, workload)
    if recipe.policy.scratch is None:
        recipe = on_local_files(recipe, tmp_path)
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
    recipe = with_model(read("qwen3_8b"), write_config(tmp_path / "model", num_layers=36, num_positions=4096))
    with pytest.raises(ConfigError, match=r"engine\.max_model_len must be <= the policy's 4096 positions, got 12288"):
        prepared(tmp_path / "runs", recipe)


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
