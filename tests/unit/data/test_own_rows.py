"""Rows of a user's own: columns by name, filters, weights, and what the policy is shown before a problem."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from slipstream.data.config import DataConfig, SourceConfig
from slipstream.data.prompts import PromptSets, load_prompt_sets
from slipstream.data.synthetic import SyntheticConfig
from slipstream.data.tokenizer import CHAT_TEMPLATE, build_tokenizer
from slipstream.types import Prompt
from tests.unit.conftest import Refusal
from tests.unit.recipe_fields.data import AnyAnswer
from tests.unit.refusals import rows

TOKENIZER = build_tokenizer(max_length=256)
ROWS = [
    {"asked": f"{i}+{i}=?", "worked": f"so {2 * i} # #### {2 * i}", "level": 1 + i % 3, "hard": i > 5}
    for i in range(1, 10)
]
OWN = {"columns": {"problem": "asked", "answer": "worked", "extra": ["level"]}, "answer_after": "####"}


def lay(directory: Path, kind: str, rows: Sequence[Mapping[str, Any]] = ROWS) -> str:
    """Write rows as a file of a kind; returns its path, or the directory's for two files in one."""
    path = directory / f"rows.{kind}"
    if kind == "parquet":
        Dataset.from_list([dict(row) for row in rows]).to_parquet(path)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "directory":
        path.mkdir()
        for number, part in enumerate((rows[:4], rows[4:])):
            (path / f"part-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(*sources: Mapping[str, Any], tokenizer: Any = TOKENIZER, **changes: Any) -> PromptSets:
    """Load sets whose training set is given; every answer that is not empty can be scored."""
    given = {"train": tuple(SourceConfig(**source) for source in sources), **changes}
    config = DataConfig(**{"max_prompt_tokens": 128, "synthetic": SyntheticConfig(num_draft_rows=5), **given})
    known = AnyAnswer()
    return load_prompt_sets(config, tokenizer=tokenizer, gradable=known.gradable, equal=known.equal)


def answers(prompts: Sequence[Prompt]) -> dict[str, str]:
    return {prompt.text: prompt.answer for prompt in prompts}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv", "directory"])
def test_rows_of_any_columns_are_read_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    sets = load({"path": lay(tmp_path, kind), **OWN, "where": {"level": 2, "hard": True}})
    assert answers(sets.train) == {"7+7=?": "14"}
    (prompt,) = sets.train
    assert prompt.extra["level"] in (2, "2")


BARE = {"columns": {"problem": "q", "answer": "a"}}


def test_the_answer_stands_after_the_last_mark_and_one_of_a_csv_as_it_is_written(tmp_path: Path) -> None:
    rows = [{"q": "1+1=?", "a": "# 3 # 2"}, {"q": "2+2=?", "a": "4"}, {"q": "3+3=?", "a": None}]
    sets = load({"path": lay(tmp_path, "jsonl", rows), **BARE, "answer_after": "#"})
    assert answers(sets.train) == {"1+1=?": "2"}
    assert next(each for each in sets.records if each.name == "train").num_unparseable == 2
    rows = [{"q": "a?", "a": "007"}, {"q": "b?", "a": ""}, {"q": "c?", "a": "NA"}, {"q": "d?", "a": "1.50"}]
    sets = load({"path": lay(tmp_path, "csv", rows), **BARE})
    assert answers(sets.train) == {"a?": "007", "c?": "NA", "d?": "1.50"}


@pytest.mark.parametrize(
    "given",
    [["2024-01-05", "2023-12-24"], [12, "042", "[1, 2]", "0.50", "true"], [2**64 + 1, 7], [0.5, 7]],
    ids=["dates", "texts beside a number", "large", "decimals"],
)
def test_a_value_of_json_is_read_as_it_is_written(tmp_path: Path, given: list[Any]) -> None:
    rows = [{"q": f"{number}?", "a": answer} for number, answer in enumerate(given)]
    sets = load({"path": lay(tmp_path, "jsonl", rows), **BARE})
    assert answers(sets.train) == {f"{number}?": str(answer) for number, answer in enumerate(given)}


def test_files_of_one_csv_set_may_differ_in_columns_and_have_an_index_of_pandas(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("q,a\n1?,01\n")
    (tmp_path / "1.csv").write_text(",a,level,q\n0,02,hard,2?\n1,03,easy,3?\n")
    sets = load({"path": str(tmp_path), **BARE})
    assert answers(sets.train) == {"1?": "01", "2?": "02", "3?": "03"}
    sets = load({"path": str(tmp_path), **BARE, "where": {"level": "hard"}})
    assert answers(sets.train) == {"2?": "02"}


def test_a_column_may_hold_a_chat_and_a_source_may_name_its_data_source(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "1+1=?"}]
    source = {"path": lay(tmp_path, "jsonl", [{"q": turns, "a": 2, "data_source": "theirs"}]), **BARE}
    (theirs,) = load(source).train
    (ours,) = load({**source, "data_source": "ours"}).train
    assert (theirs.text, theirs.answer, theirs.data_source) == ("system: be kind\n\nuser: 1+1=?", "2", "theirs")
    assert (ours.data_source, ours.id) == ("ours", theirs.id)


def test_rows_of_a_known_schema_bring_what_a_reward_function_reads_and_have_an_answer_whatever_it_takes(
    tmp_path: Path,
) -> None:
    def takes_all(given: Sequence[Any], _: str) -> tuple[bool, ...]:
        return (True,) * len(given)

    brought = {"data_source": "theirs", "extra_info": {"tests": "t"}}
    answered = [{"question": f"{n}?", "answer": answer, **brought} for n, answer in enumerate(("2", "", None))]
    train = (SourceConfig(path=lay(tmp_path, "jsonl", answered)),)
    config = DataConfig(max_prompt_tokens=64, train=train, synthetic=SyntheticConfig(num_draft_rows=5))
    sets = load_prompt_sets(config, tokenizer=TOKENIZER, gradable=takes_all, equal=takes_all)
    assert answers(sets.train) == {"0?": "2", "1?": ""}
    assert {(each.data_source, each.extra["tests"]) for each in sets.train} == {("theirs", "t")}
    assert next(each for each in sets.records if each.name == "train").num_unparseable == 1


@rows(
    """
{columns: {problem: question}} => .columns.problem must be one of THERE, got 'question'
{columns: {problem: asked, answer: worked, extra: [year]}} => .columns.extra must be one of THERE, got 'year'
{where: {year: 1}} => .where must name one of THERE, got 'year'
{where: {level: 7}} => .where must leave a row of PATH, got {'level': 7}; level has 2, 3, 1
{columns: {problem: level, answer: worked}}
    must follow the schema of `columns` in row 1 of PATH, got ...level must be text, got 2
"""
)
def test_columns_and_filters_that_fit_no_row_are_refused_with_what_there_is(
    refusal: Refusal, tmp_path: Path, given: str, expected: str
) -> None:
    path = lay(tmp_path, "jsonl")
    there = f"asked, hard, level, worked, the columns of {path}"
    wanted = f"data.train {expected}".replace(" .", ".").replace("THERE", there).replace("PATH", path)
    said = refusal(lambda: load({"path": path, **OWN, **yaml.safe_load(given)}))
    start, _, end = wanted.partition("...")
    assert said == wanted or (end and said.startswith(start) and said.endswith(end))


@pytest.mark.parametrize(("kind", "place"), [("jsonl", "row 7 of {}"), ("directory", "row 3 of {}/part-1.jsonl")])
def test_a_row_without_a_problem_is_named_by_its_file_and_number_whatever_was_filtered(
    tmp_path: Path, kind: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**row, "asked": None} if row["asked"] == "7+7=?" else row for row in ROWS]
    path = lay(tmp_path, kind, rows)
    load({"path": path, **OWN, "where": {"hard": True}})
    assert f"data.train: 1 rows have no usable problem, the first: {place.format(path)}, got " in caplog.text
    assert "asked must be text, got None" in caplog.text


def test_a_switch_of_a_chat_template_or_a_task_may_be_a_word_of_yaml() -> None:
    given = {"enable_thinking": "off", "effort": "low"}
    config = DataConfig(max_prompt_tokens=8, chat_template_args=given)
    assert config.chat_template_args == {"enable_thinking": False, "effort": "low"}
    assert SourceConfig(path="reasoning_gym:chain_sum", config={"size": "no"}).config == {"size": False}


def test_weights_leave_prompts_out_until_the_shares_hold_and_the_scarcest_source_is_whole(tmp_path: Path) -> None:
    few = [{"asked": f"{i}-{i}=?", "worked": "#### 0"} for i in range(1, 4)]
    (tmp_path / "few").mkdir()
    columns = {"columns": {"problem": "asked", "answer": "worked"}}
    sources = [
        {"path": lay(tmp_path, "jsonl"), **OWN, **columns, "weight": 4},
        {"path": lay(tmp_path / "few", "jsonl", few), **columns, "weight": 2},
    ]
    sets = load(*sources)
    records = [each for each in sets.records if each.name == "train"]
    assert [(each.num_read, each.num_kept, each.num_left_out) for each in records] == [(9, 6, 3), (3, 3, 0)]
    assert load(*sources).train == sets.train
    assert {each.text for each in load(*sources, seed=1).train} != {each.text for each in sets.train}


def test_all_sources_of_a_set_have_a_weight_or_none_has(refusal: Refusal) -> None:
    train = tuple(SourceConfig(path="a/b", weight=weight) for weight in (1, None))
    message = "data.train must have a weight in all of its sources or in none, got [1.0, None]"
    assert refusal(DataConfig, max_prompt_tokens=1, train=train) == message


def test_the_policy_reads_the_system_turn_and_the_examples_before_the_problem(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "2+2=?"}]
    rows = [{"q": [{"role": "user", "content": "1+1=?"}], "a": "2"}, {"q": chat, "a": "4"}]
    source = {"path": lay(tmp_path, "jsonl", rows), **BARE}
    plain = {prompt.text: prompt.id for prompt in load(source).train}
    examples = ({"problem": "3+3=?", "response": "6"},)
    shown = load(source, system="be brief", examples=examples, instruction="solve {problem}")
    example = "<|im_start|><|user|>solve 3+3=?<|im_end|><|im_start|><|assistant|>6<|im_end|>"
    texts = {prompt.text: str(TOKENIZER.decode(list(prompt.token_ids))) for prompt in shown.train}
    assert texts["1+1=?"] == (
        f"<|im_start|><|system|>be brief<|im_end|>{example}"
        "<|im_start|><|user|>solve 1+1=?<|im_end|><|im_start|><|assistant|>"
    )
    assert texts["system: be kind\n\nuser: 2+2=?"].startswith(f"<|im_start|><|system|>be kind<|im_end|>{example}")
    assert {prompt.text: prompt.id for prompt in shown.train} == plain  # they are the same problems


THINKING = CHAT_TEMPLATE.replace(
    "<|im_start|><|assistant|>' -}}", "<|im_start|><|assistant|>' ~ ('<think>' if enable_thinking else '') -}}"
)


def test_arguments_reach_the_chat_template_and_a_reward_is_told_how_the_turn_was_opened(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(max_length=256)
    tokenizer.chat_template = THINKING
    source = {"path": lay(tmp_path, "jsonl"), **OWN}
    for value, end in ((True, "<|im_start|><|assistant|><think>"), (False, "<|im_start|><|assistant|>")):
        sets = load(source, tokenizer=tokenizer, chat_template_args={"enable_thinking": value})
        assert {prompt.extra["prompt_end"] for prompt in sets.train} == {end}
        assert str(TOKENIZER.decode(list(sets.train[0].token_ids))).endswith(end)


WITHOUT_SYSTEM = "{%- for m in messages -%}{%- if m.role != 'system' -%}{{- m.content -}}{%- endif -%}{%- endfor -%}"


TEMPLATES = {
    "THINKING": THINKING,
    "PLAIN": CHAT_TEMPLATE,
    "WITHOUT_SYSTEM": WITHOUT_SYSTEM,
    "ONE_TURN": WITHOUT_SYSTEM.replace("{{- m.content -}}", "{{- raise_exception('one turn') if m.role != 'user' -}}"),
}


@rows(
    """
THINKING: {chat_template_args: {thinking: true}}
    data.chat_template_args must be arguments of the policy's chat template, which takes enable_thinking, got 'thinking'
PLAIN: {chat_template_args: {messages: x}}
    data.chat_template_args must be arguments of the policy's chat template, which takes none, got 'messages'
WITHOUT_SYSTEM: {system: be brief}
    data.system must be shown by the policy's chat template, got 'system'; it leaves that turn out
ONE_TURN: {examples: [{problem: '1', response: '2'}]}
    data.examples must be taken by the policy's chat template, got one turn; leave it out
"""
)
def test_what_the_chat_template_does_not_take_is_refused(
    refusal: Refusal, tmp_path: Path, given: str, expected: str
) -> None:
    tokenizer = build_tokenizer(max_length=256)
    ((name, changes),) = yaml.safe_load(given).items()
    tokenizer.chat_template = TEMPLATES[name]
    assert refusal(lambda: load({"path": lay(tmp_path, "jsonl"), **OWN}, tokenizer=tokenizer, **changes)) == expected


@rows(
    """
{path: "reasoning_gym:chain_sum", where: {level: 1}}
    data source.where must be left out with path reasoning_gym:chain_sum, got {'level': 1}; its rows are made on the
    spot
{path: synthetic, split: test}
    data source.split must be left out with path synthetic, got 'test'; its rows are made on the spot
{path: a/b, config: {size: 3}}
    data source.config must be left out without reasoning_gym:TASK as path, got {'size': 3}
{path: a/b, where: {level: [1, 2]}} => data source.where.level must be text, a number, true, false or null, got [1, 2]
"""
)
def test_fields_of_another_kind_of_source_are_refused(refusal: Refusal, given: str, expected: str) -> None:
    assert refusal(SourceConfig, **yaml.safe_load(given)) == expected
