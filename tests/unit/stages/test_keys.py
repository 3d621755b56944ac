"""What a change of each recipe field makes again: data, policy and draft, or nothing that is kept."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import merge
from slipstream.data.tokenizer import write_tokenizer
from slipstream.recipe import Recipe, load_recipe
from slipstream.stages.store import data_identity, data_key, draft_key, policy_identity, policy_key
from slipstream.types import Workload

BASE = {"learner": {"dtype": "float32"}, "engine": {"dtype": "float32"}}  # settled, as the stages have them
NOTHING: set[str] = set()
DRAFT = {"draft"}
LEARNED = {"policy", "draft"}
ALL = {"data", "policy", "draft"}

CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({"name": "other"}, NOTHING),
    ({"workload": "rl_think"}, LEARNED),
    ({"policy": {"scratch": {"num_steps": 271}}}, LEARNED),
    ({"policy": {"scratch": {"num_layers": 25}}}, LEARNED),
    ({"policy": {"scratch": {"seed": 1}}}, LEARNED),
    ({"policy": {"scratch": {"max_position_embeddings": 513}}}, ALL),  # the tokenizer's longest sequence too
    ({"learner": {"dtype": "bfloat16"}}, LEARNED),
    ({"learner": {"num_threads": 1}}, LEARNED),
    ({"engine": {"dtype": "bfloat16"}}, DRAFT),
    ({"engine": {"max_num_seqs": 128}}, DRAFT),
    ({"engine": {"num_kept_idle": 0}}, NOTHING),
    ({"engine": {"answer_timeout_s": 9.0, "start_timeout_s": 9.0, "max_restarts": 9}}, NOTHING),
    ({"learner": {"answer_timeout_s": 9.0, "start_timeout_s": 9.0, "max_restarts": 9}}, NOTHING),
    ({"learner": {"num_kept_idle": 0}}, NOTHING),
    ({"sampling": {"max_response_tokens": 150}}, DRAFT),
    ({"placement": {"start_timeout_s": 5.0}}, NOTHING),
    ({"data": {"max_prompt_tokens": 63}}, ALL),
    ({"data": {"instruction": "add {problem}"}}, ALL),
    ({"data": {"seed": 1}}, ALL),
    ({"data": {"synthetic": {"noise_rate": 0.03}}}, ALL),
    ({"draft": {"init": "general"}}, DRAFT),
    ({"draft": {"num_steps": 257}}, DRAFT),
    ({"draft": {"aux_hidden_state_layer_ids": [2, 12, 20]}}, DRAFT),
    ({"draft": {"seed": 1}}, DRAFT),
    ({"draft": {"checkpoint_every_steps": 7}}, NOTHING),
    ({"tuning": {"candidate_ks": [0, 1, 2]}}, NOTHING),
    ({"tuning": {"num_repeats": 4}}, NOTHING),
    ({"grpo": {"num_steps": 25}}, NOTHING),
    ({"grpo": {"seed": 1}}, NOTHING),
    ({"grpo": {"optimizer": {"learning_rate": 1e-4}}}, NOTHING),
    ({"evaluation": {"num_samples_per_problem": 4}}, NOTHING),
    ({"losslessness": {"num_tokens": 900}}, NOTHING),
    ({"refit": {"check_every_steps": 7}}, NOTHING),
    ({"reward": {"timeout_s": 4.0}}, ALL),  # decides which answers can be read
    ({"reward": {"num_workers": 2}}, NOTHING),
    ({"tracking": {"replay_every_s": 1.0}}, NOTHING),
    ({"loop": {"mode": "one_step_off"}}, NOTHING),
    ({"simulator": {"model": "tiny", "hardware": "gb200"}}, NOTHING),
]


def keys(recipe: Recipe) -> dict[str, str]:
    """Of the chain: each stage's input is what the one before it makes, as far as its key says."""
    data = data_key(recipe)
    policy = policy_key(recipe, data=data)
    return {"data": data, "policy": policy, "draft": draft_key(recipe, policy=policy, data=data)}


def tiny(overrides: dict[str, Any]) -> Recipe:
    """The shipped recipe with `overrides`; another workload without the section that belongs to it."""
    rest = {name: value for name, value in overrides.items() if name != "workload"}
    recipe = load_recipe("tiny", overrides=merge(BASE, rest))
    return replace(recipe, workload=Workload(overrides.get("workload", recipe.workload)))


@pytest.mark.parametrize(("overrides", "changed"), CASES, ids=[json.dumps(case[0]) for case in CASES])
def test_a_field_changes_the_keys_of_what_depends_on_it_and_no_other(
    overrides: dict[str, Any], changed: set[str]
) -> None:
    before, after = keys(tiny({})), keys(tiny(overrides))
    assert {stage for stage in before if before[stage] != after[stage]} == changed


def test_every_section_of_a_recipe_has_its_case() -> None:
    assert {field.name for field in fields(Recipe)} == {name for overrides, _ in CASES for name in overrides}


def test_data_of_a_local_file_are_known_by_its_content(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    recipe = tiny({"data": {"train": [{"path": str(source)}]}})
    found = []
    for text in ("one\n", "two\n", "one\n"):
        source.write_text(text)
        found.append(data_key(recipe))
    assert found[0] == found[2] != found[1]


def test_data_with_another_policys_tokenizer_are_other_data(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    recipe = tiny({})
    own = data_key(recipe)
    other = data_key(recipe, policy=tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    assert len({own, other, data_key(recipe, policy=tmp_path)}) == 3


def test_a_brought_policy_is_known_by_the_bytes_of_its_weights_and_configs(tmp_path: Path) -> None:
    """Size, header and name stay the same when a model is trained on and written again."""
    weights, record = tmp_path / "model.safetensors", tmp_path / "policy.json"
    (tmp_path / "config.json").write_text("{}")
    write_tokenizer(tmp_path, max_length=64)
    weights.write_bytes(b"header" + bytes(64))
    first = policy_identity(tmp_path)
    record.write_text("seconds that it took")  # written by our stage: says nothing of the policy
    assert policy_identity(tmp_path) == first
    weights.write_bytes(b"header" + bytes(63) + b"\1")
    second = policy_identity(tmp_path)
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert len({first, second, policy_identity(tmp_path)}) == 3


def test_data_are_known_by_their_prompts_and_tokenizer_not_by_their_manifest(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", max_length=64)
    (tmp_path / "train.jsonl").write_text("a")
    first = data_identity(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    assert data_identity(tmp_path) == first
    (tmp_path / "train.jsonl").write_text("b")
    second = data_identity(tmp_path)
    write_tokenizer(tmp_path / "tokenizer", max_length=65)
    assert len({first, second, data_identity(tmp_path)}) == 3
