"""What the stages share: the types that `auto` stands for are settled once an execution."""

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.data.chat import render
from slipstream.data.config import DataConfig
from slipstream.data.tokenizer import CHAT_TEMPLATE, END, build_tokenizer
from slipstream.recipe import load_recipe
from slipstream.records.files import write_record
from slipstream.records.run import NumericsRecord
from slipstream.stages.support import decode, numerics, recipe_layout, settled
from slipstream.types import Dtype
from tests.small import run_context

MEASURED = NumericsRecord(dtype="float32", reason="hand-made", float32_ms=1.0, bfloat16_ms=9.0, capabilities=())


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_learner_and_engine_both_compute_in_what_the_execution_settled_on(tmp_path: Path, dtype: Dtype) -> None:
    context = run_context(tmp_path)
    write_record(replace(MEASURED, dtype=dtype.value), context.directory("numerics") / "numerics.json")
    recipe = settled(context, load_recipe("tiny"))
    assert (recipe.learner.dtype, recipe.engine.dtype) == (dtype, dtype)


def test_the_first_stage_measures_and_others_take_its_answer_unless_the_recipe_names_a_type(tmp_path: Path) -> None:
    context, recipe = run_context(tmp_path), load_recipe("tiny")
    first = numerics(context, recipe)
    assert first is not None
    assert numerics(context, recipe) == first  # with the times that were measured once
    assert settled(context, recipe).learner.dtype == first.dtype
    context = run_context(tmp_path, "other")
    named = load_recipe("tiny", overrides={"learner": {"dtype": "float32"}, "engine": {"dtype": "bfloat16"}})
    assert settled(context, named) == named
    assert numerics(context, named) is None
    mixed = settled(context, load_recipe("tiny", overrides={"learner": {"dtype": "float32"}}))
    assert mixed.learner.dtype is Dtype.FLOAT32
    assert mixed.engine.dtype is not Dtype.AUTO


def test_parts_of_an_ablation_that_measure_at_the_same_time_take_the_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = run_context(tmp_path)

    def slower(*, num_threads: int | None) -> NumericsRecord:
        write_record(MEASURED, context.directory("numerics") / "numerics.json")
        return replace(MEASURED, dtype="bfloat16")

    monkeypatch.setattr("slipstream.learner.numerics.choose_dtype", slower)
    assert numerics(context, load_recipe("tiny")) == MEASURED
    assert [path.name for path in context.directory("numerics").iterdir()] == ["numerics.json"]


def test_a_run_is_projected_from_itself_only_with_the_draft_whose_cost_the_simulator_knows() -> None:
    assert recipe_layout(load_recipe("tiny")) is not None
    for method in ("ngram", "draft_model"):
        assert recipe_layout(load_recipe("tiny", overrides={"draft": {"method": method}})) is None


OPENING = "{%- if add_generation_prompt -%}{{- '<|im_start|><|assistant|>"


@pytest.mark.parametrize(
    ("opening", "problem", "text"),
    [
        ("", "1+1=?", "so 2"),
        ("<think>\\n", "1+1=?", "<think>so 2"),
        ("<think>\\nwell, ", "1+1=?", "<think>so 2"),
        ("<think>\\n\\n</think>\\n", "1+1=?", "so 2"),
        ("", "begin with <think>, 1+1=?", "so 2"),
        ("<think>\\n", "write </think> at the end, 1+1=?", "<think>so 2"),
    ],
)
def test_a_response_is_scored_with_the_thought_that_the_template_opened(opening: str, problem: str, text: str) -> None:
    tokenizer = build_tokenizer(max_length=128)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(OPENING, OPENING + opening)
    response = tokenizer(f"so 2{END}", add_special_tokens=False)["input_ids"]
    prompt = render(problem, config=DataConfig(max_prompt_tokens=64), tokenizer=tokenizer)
    assert decode(tokenizer)(prompt, response) == text


def test_the_tags_of_thoughts_are_kept_where_the_tokenizer_has_them_as_special_tokens() -> None:
    tokenizer = build_tokenizer(max_length=128)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    response = tokenizer(f"<think>1</think>2{END}", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(response, skip_special_tokens=True) == "12"
    assert decode(tokenizer)((), response) == "<think>1</think>2"
