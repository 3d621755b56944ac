"""What is kept for later executions, and what determines it: a key for each output, by what it depends on."""

import json
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import merge
from slipstream.data.tokenizer import write_tokenizer
from slipstream.recipe import Recipe, load_recipe
from slipstream.rewards.function import kept as kept_reward
from slipstream.stages import store
from slipstream.stages.context import RunContext
from slipstream.stages.store import data_identity, data_key, draft_key, finished, policy_identity, policy_key, publish
from slipstream.types import Workload
from tests.small import UNTRACKED, run_context

STAGE = "pretrain_draft"
RECIPE = load_recipe("tiny", overrides={"tracking": UNTRACKED})


def kept(run: RunContext, key: str = "k1") -> Path | None:
    return store.kept(run, RECIPE, STAGE, key)


def make(run: RunContext, text: str) -> Path:
    (run.directory(STAGE) / "draft.json").write_text(text)
    return publish(run, STAGE, "k1")


def made(path: Path | RunContext) -> str:
    return ((path.directory(STAGE) if isinstance(path, RunContext) else path) / "draft.json").read_text()


def test_what_one_execution_made_the_next_takes_by_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, second = run_context(tmp_path, "first"), run_context(tmp_path, "second")
    assert kept(first) is None
    entry = make(first, "of first")
    assert entry == tmp_path / "store" / STAGE / "k1"
    assert kept(second, "k2") is None
    assert kept(second) == entry
    assert "pretrain_draft: reused" in caplog.text
    assert "by execution first from the same recipe sections" in caplog.text
    assert made(first) == made(second) == "of first"
    spool = next((tmp_path / "spool").glob("*second-pretrain-draft*.jsonl")).read_text()
    assert '"reused_from":"first"' in spool


def test_a_fresh_execution_makes_its_own_and_leaves_the_store_alone(tmp_path: Path) -> None:
    stored = make(run_context(tmp_path, "first"), "of first")
    fresh = run_context(tmp_path, "fresh", reuse_stored=False)
    assert kept(fresh) is None
    own = make(fresh, "of fresh")
    assert own == tmp_path / "fresh" / STAGE
    assert (made(own), made(stored)) == ("of fresh", "of first")
    assert kept(fresh) == own  # resumed: it goes on with its own


def test_of_two_that_make_the_same_thing_at_once_both_end_with_a_whole_one(tmp_path: Path) -> None:
    first, second = run_context(tmp_path, "first"), run_context(tmp_path, "second")
    (second.directory(STAGE) / "draft.json").write_text("of second")
    assert make(first, "of first") == tmp_path / "store" / STAGE / "k1"
    assert publish(second, STAGE, "k1") == tmp_path / "second" / STAGE
    assert (made(first), made(second)) == ("of first", "of second")


def test_what_another_execution_keeps_meanwhile_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, look = run_context(tmp_path, "first"), run_context(tmp_path, "second"), store._made
    (second.directory(STAGE) / "draft.json").write_text("of second")

    def look_and_lose(directory: Path, key: str) -> Any:
        found = look(directory, key)
        monkeypatch.setattr(store, "_made", look)
        make(first, "of first")
        return found

    monkeypatch.setattr(store, "_made", look_and_lose)
    assert publish(second, STAGE, "k1") == tmp_path / "second" / STAGE
    assert (made(first), made(second)) == ("of first", "of second")


def test_an_output_that_lost_a_file_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, weights = run_context(tmp_path, "first"), Path("draft", "model.safetensors")
    (run.directory(STAGE) / "draft").mkdir()
    (run.directory(STAGE) / weights).write_text("weights")
    entry = make(run, "of first")
    (entry / weights).unlink()
    for again in (run, run_context(tmp_path, "second")):
        assert kept(again) is None
    assert f"{entry / weights} is gone" in caplog.text
    assert make(run, "once more") == entry


def test_half_an_output_and_one_that_was_removed_are_never_used_and_made_again(tmp_path: Path) -> None:
    run, entry = run_context(tmp_path, "first"), tmp_path / "store" / STAGE / "k1"
    entry.mkdir(parents=True)
    (entry / "draft.json").write_text("ha")
    assert kept(run) is None
    assert made(make(run, "whole")) == "whole"
    entry.rename(tmp_path / "elsewhere")
    assert kept(run) is None
    assert made(make(run, "again")) == "again"


def test_what_an_attempt_left_gives_way_to_a_stored_output(tmp_path: Path) -> None:
    torn = run_context(tmp_path, "torn")
    (torn.directory(STAGE) / "checkpoint").mkdir()
    entry = make(run_context(tmp_path, "first"), "of first")
    assert kept(torn) == entry
    assert [path.name for path in sorted(torn.directory(STAGE).iterdir())] == ["draft.json", "made.json"]


def test_a_stage_is_finished_by_its_record_alone(tmp_path: Path) -> None:
    run = run_context(tmp_path, "first")
    directory = run.directory("tune_draft_length")
    (directory / "sweep.svg").write_text("")
    assert finished(run, "tune_draft_length", "tuning.json") is None
    (directory / "tuning.json").write_text("{}")
    assert finished(run, "tune_draft_length", "tuning.json") == directory
    assert finished(run_context(tmp_path, "second"), "tune_draft_length", "tuning.json") is None


def test_what_is_stored_survives_a_move_of_the_root(tmp_path: Path) -> None:
    make(run_context(tmp_path / "old", "first"), "of first")
    (tmp_path / "old").rename(tmp_path / "new")
    moved = run_context(tmp_path / "new", "first")
    assert kept(moved) == tmp_path / "new" / "store" / STAGE / "k1"
    assert made(moved) == "of first"


def test_an_output_whose_link_leads_nowhere_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As to a model in a cache that was moved."""
    model, run = tmp_path / "model.safetensors", run_context(tmp_path / "runs", "first")
    model.write_text("weights")
    (run.directory(STAGE) / "model.safetensors").symlink_to(model)
    entry = make(run, "of first")
    assert kept(run) == entry
    model.unlink()
    for again in (run, run_context(tmp_path / "runs", "second")):
        assert kept(again) is None
    assert f"pretrain_draft: the target {model} of the link " in caplog.text
    assert make(run, "once more") == entry
    assert made(entry) == "once more"
    assert kept(run) == entry


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
def test_a_field_changes_the_keys_of_what_depends_on_it_alone(overrides: dict[str, Any], changed: set[str]) -> None:
    before, after = keys(tiny({})), keys(tiny(overrides))
    assert {stage for stage in before if before[stage] != after[stage]} == changed


def test_every_section_of_a_recipe_has_its_case() -> None:
    assert {field.name for field in fields(Recipe)} == {name for overrides, _ in CASES for name in overrides}


def test_data_are_known_by_the_content_of_a_local_file_and_of_another_policys_tokenizer(tmp_path: Path) -> None:
    source, words = tmp_path / "rows.jsonl", tmp_path / "tokenizer.json"
    recipe = tiny({"data": {"train": [{"path": str(source)}]}})

    def key(rows: str, tokenizer: str | None = None) -> str:
        source.write_text(rows)
        words.write_text(tokenizer or "")
        return data_key(recipe, policy=None if tokenizer is None else tmp_path)

    assert key("one\n") == key("one\n")
    assert len({key("one\n"), key("two\n"), key("one\n", "{}"), key("one\n", '{"a": 1}')}) == 4
    recipe = tiny({"data": {"train": [{"path": str(tmp_path)}]}})
    first = key("one\n")
    source.rename(tmp_path / "test.jsonl")
    assert data_key(recipe) != first


def test_data_of_one_reward_function_have_one_key_though_each_execution_keeps_a_copy_of_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(): ...")
    of: dict[str, Any] = {"function": f"{file}:score"}
    for reward in (of, {"functions": [of | {"data_source": "a"}, {"function": "mathematics", "data_source": "b"}]}):
        recipe = tiny({"reward": reward})
        copies = [replace(recipe, reward=kept_reward(recipe.reward, tmp_path / name)) for name in "ab"]
        assert copies[0].reward != copies[1].reward
        assert len(set(map(data_key, copies))) == 1


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
