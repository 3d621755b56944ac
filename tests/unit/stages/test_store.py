"""What is kept for later executions, and what determines it: a key for each output, by what it depends on."""

from __future__ import annotations

import json
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import merge
from slipstream.data.tokenizer import write_tokenizer
from slipstream.recipe import Recipe, load_recipe
from slipstream.stages.context import RunContext
from slipstream.stages.store import (
    data_identity,
    data_key,
    draft_key,
    finished,
    kept,
    policy_identity,
    policy_key,
    publish,
)
from slipstream.tracking.config import TrackingConfig
from slipstream.types import Workload

UNTRACKED = TrackingConfig(uri="http://127.0.0.1:9", replay_every_s=0.1, close_wait_s=0.0)
STAGE = "pretrain_draft"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return replace(load_recipe("tiny"), tracking=UNTRACKED)


def context(root: Path, execution: str, *, reuse_stored: bool = True) -> RunContext:
    return RunContext(
        execution=execution, root=str(root), experiment="tiny", workload="rl_zero", reuse_stored=reuse_stored
    )


def make(run: RunContext, text: str, key: str = "k1") -> Path:
    (run.directory(STAGE) / "draft.json").write_text(text)
    return publish(run, STAGE, key)


def test_what_one_execution_made_the_next_one_takes_and_says_so(
    tmp_path: Path, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = context(tmp_path, "first"), context(tmp_path, "second")
    assert kept(first, recipe, STAGE, "k1") is None
    entry = make(first, "of first")
    assert entry == tmp_path / "store" / STAGE / "k1"
    assert kept(second, recipe, STAGE, "k1") == entry
    assert "pretrain_draft: reused" in caplog.text
    assert "by execution first from the same recipe sections" in caplog.text
    for run in (first, second):
        assert (run.directory(STAGE) / "draft.json").read_text() == "of first"
    spool = next((tmp_path / "spool").glob("*second-pretrain-draft*.jsonl")).read_text()
    assert '"reused_from":"first"' in spool


def test_another_key_is_another_output(tmp_path: Path, recipe: Recipe) -> None:
    make(context(tmp_path, "first"), "of first")
    assert kept(context(tmp_path, "second"), recipe, STAGE, "k2") is None


def test_a_fresh_execution_makes_its_own_and_leaves_the_store_alone(tmp_path: Path, recipe: Recipe) -> None:
    stored = make(context(tmp_path, "first"), "of first")
    fresh = context(tmp_path, "fresh", reuse_stored=False)
    assert kept(fresh, recipe, STAGE, "k1") is None
    own = make(fresh, "of fresh")
    assert own == tmp_path / "fresh" / STAGE
    assert (own / "draft.json").read_text() == "of fresh"
    assert (stored / "draft.json").read_text() == "of first"
    assert kept(fresh, recipe, STAGE, "k1") == own  # resumed: it goes on with its own


def test_of_two_that_make_the_same_thing_at_once_both_end_with_a_whole_one(tmp_path: Path) -> None:
    first, second = context(tmp_path, "first"), context(tmp_path, "second")
    (first.directory(STAGE) / "draft.json").write_text("of first")
    (second.directory(STAGE) / "draft.json").write_text("of second")
    assert publish(first, STAGE, "k1") == tmp_path / "store" / STAGE / "k1"
    assert publish(second, STAGE, "k1") == tmp_path / "second" / STAGE
    assert [(run.directory(STAGE) / "draft.json").read_text() for run in (first, second)] == ["of first", "of second"]


def test_half_an_output_is_never_used_and_makes_room_for_a_whole_one(tmp_path: Path, recipe: Recipe) -> None:
    half = tmp_path / "store" / STAGE / "k1"
    half.mkdir(parents=True)
    (half / "draft.json").write_text("ha")
    run = context(tmp_path, "first")
    assert kept(run, recipe, STAGE, "k1") is None
    assert (make(run, "whole") / "draft.json").read_text() == "whole"


def test_what_an_attempt_left_gives_way_to_a_stored_output(tmp_path: Path, recipe: Recipe) -> None:
    torn = context(tmp_path, "torn")
    (torn.directory(STAGE) / "checkpoint").mkdir()
    entry = make(context(tmp_path, "first"), "of first")
    assert kept(torn, recipe, STAGE, "k1") == entry
    assert [path.name for path in sorted(torn.directory(STAGE).iterdir())] == ["draft.json", "made.json"]


def test_a_removed_store_is_made_again(tmp_path: Path, recipe: Recipe) -> None:
    run = context(tmp_path, "first")
    make(run, "of first").rename(tmp_path / "elsewhere")
    assert kept(run, recipe, STAGE, "k1") is None
    assert (make(run, "again") / "draft.json").read_text() == "again"


def test_a_stage_is_finished_by_its_record_alone(tmp_path: Path) -> None:
    run = context(tmp_path, "first")
    directory = run.directory("tune_draft_length")
    (directory / "sweep.svg").write_text("")
    assert finished(run, "tune_draft_length", "tuning.json") is None
    (directory / "tuning.json").write_text("{}")
    assert finished(run, "tune_draft_length", "tuning.json") == directory
    assert finished(context(tmp_path, "second"), "tune_draft_length", "tuning.json") is None


def test_what_is_stored_survives_a_move_of_the_root(tmp_path: Path, recipe: Recipe) -> None:
    make(context(tmp_path / "old", "first"), "of first")
    (tmp_path / "old").rename(tmp_path / "new")
    moved = context(tmp_path / "new", "first")
    assert kept(moved, recipe, STAGE, "k1") == tmp_path / "new" / "store" / STAGE / "k1"
    assert (moved.directory(STAGE) / "draft.json").read_text() == "of first"


def test_an_output_with_a_link_that_leads_nowhere_is_made_again(
    tmp_path: Path, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    """As to a model in a cache that was moved."""
    model = tmp_path / "hub" / "model.safetensors"
    model.parent.mkdir()
    model.write_text("weights")
    run = context(tmp_path / "runs", "first")
    (run.directory(STAGE) / "model.safetensors").symlink_to(model)
    entry = make(run, "of first")
    assert kept(run, recipe, STAGE, "k1") == entry
    model.unlink()
    for again in (run, context(tmp_path / "runs", "second")):
        assert kept(again, recipe, STAGE, "k1") is None
    assert f"pretrain_draft: the target {model} of the link " in caplog.text
    assert make(run, "once more") == entry
    assert (entry / "draft.json").read_text() == "once more"
    assert kept(run, recipe, STAGE, "k1") == entry


BASE = {"learner": {"dtype": "float32"}, "engine": {"dtype": "float32"}}  # settled, as the stages have them
NOTHING: set[str] = set()
DRAFT = {"draft"}
LEARNED = {"policy", "draft"}
ALL = {"data", "policy", "draft"}

CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({"name": "other"}, NOTHING),
    ({"workload": "rl_think"}, LEARNED),
    ({"policy": {"scratch": {"shape": {"num_layers": 25}}}}, LEARNED),
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
    ({"data": {"synthetic": {"noise_rate": 0.03}}}, ALL),
    ({"draft": {"init": "general"}}, DRAFT),
    ({"draft": {"pretrain": {"num_steps": 257}}}, DRAFT),
    ({"draft": {"eagle3": {"aux_hidden_state_layer_ids": [2, 12, 20]}}}, DRAFT),
    ({"draft": {"pretrain": {"checkpoint_every_steps": 7}}}, NOTHING),
    ({"tuning": {"candidate_ks": [0, 1, 2]}}, NOTHING),
    ({"grpo": {"seed": 1}}, NOTHING),
    ({"evaluation": {"num_samples_per_problem": 4}}, NOTHING),
    ({"losslessness": {"num_tokens": 900}}, NOTHING),
    ({"refit": {"check_every_steps": 7}}, NOTHING),
    ({"reward": {"timeout_s": 4.0}}, ALL),  # decides which answers can be read
    ({"reward": {"num_workers": 2}}, NOTHING),
    ({"draft": {"sampling": "greedy"}}, NOTHING),
    ({"draft": {"verification": "block"}}, NOTHING),
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
