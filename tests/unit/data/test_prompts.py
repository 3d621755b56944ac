"""Loading prompts: hand-counted manifests, disjoint sets, and errors that say what to do."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.data.config import DataConfig, SourceConfig
from slipstream.data.prompts import (
    PromptSets,
    PromptStream,
    load_prompt_sets,
    prompt_id,
    read_prompt_sets,
    require_size,
    write_prompt_sets,
)
from slipstream.data.synthetic import SyntheticConfig
from slipstream.data.tokenizer import build_tokenizer
from slipstream.records.stages import DataSetRecord
from slipstream.types import Prompt
from tests.unit.conftest import Refusal
from tests.unit.data.test_schemas import DAPO_TEXT
from tests.unit.refusals import rows

TOKENIZER = build_tokenizer(max_length=256)
OPENING = "<|im_start|><|assistant|>"
SMALL = SyntheticConfig(
    num_train_problems=20, num_copies=3, num_conflicting=2, num_leaked=1, num_draft_rows=10, num_validation_problems=5
)
TURN = [{"role": "user", "content": "x"}]

Row = dict[str, Any]


class Integers:
    """A scorer that knows integers alone, so that these tests start no worker."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    def gradable(self, references: Sequence[str], data_source: str) -> list[bool]:
        return [value(reference) is not None for reference in references]

    def equal(self, pairs: Sequence[tuple[str, str]], data_source: str) -> list[bool]:
        self.asked.append(list(pairs))
        return [value(left) == value(right) for left, right in pairs]


def value(answer: str) -> int | None:
    plain = answer.replace(",", "").replace("\u2212", "-").removesuffix(".0")
    return int(plain) if plain.lstrip("-").isdecimal() else None


def dapo(problem: str, answer: str) -> Row:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": problem}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": "0"},
    }


def write(path: Path, rows: Sequence[Row]) -> tuple[SourceConfig, ...]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (SourceConfig(path=str(path)),)


def load(*, answers: Integers | None = None, tokenizer: Any = TOKENIZER, **changes: Any) -> PromptSets:
    settings = {"max_prompt_tokens": 64, "synthetic": SMALL, **changes}
    scorer = Integers() if answers is None else answers
    return load_prompt_sets(DataConfig(**settings), tokenizer=tokenizer, gradable=scorer.gradable, equal=scorer.equal)


def record(sets: PromptSets, name: str) -> DataSetRecord:
    (found,) = [record for record in sets.records if record.name == name]
    return found


def prompt(problem: str) -> Prompt:
    return Prompt(id=prompt_id(problem), text=problem, token_ids=(1,), answer="1")


def test_every_row_is_counted_once_by_hand(tmp_path: Path) -> None:
    validation = write(tmp_path / "aime.jsonl", [{"problem": "9+9=?", "answer": "18"}])
    rows = [
        dapo("1+1=?", "2"),  # kept
        dapo("1+1=?", "2"),  # a duplicate
        dapo(" 1+1=?\n", "2"),  # a duplicate but for white space
        dapo("2+2=?", "4"),  # conflicts with the next
        dapo("2+2=?", "5"),
        dapo("3+3=?", "six"),  # not parseable
        dapo("4+4=?", "?"),  # not parseable; its second row is
        dapo("4+4=?", "8"),  # kept
        dapo("9+9=?", "18"),  # a validation problem
        dapo("1+" * 40 + "1=?", "41"),  # 83 characters and 4 of the template: too long
    ]
    sets = load(train=write(tmp_path / "dapo.jsonl", rows), validation=validation)
    assert {(prompt.text, prompt.answer) for prompt in sets.train} == {("1+1=?", "2"), ("4+4=?", "8")}
    dropped = {"num_duplicates": 2, "num_conflicting": 2, "num_unparseable": 2, "num_too_long": 1, "num_held_out": 1}
    source = str(tmp_path / "dapo.jsonl")
    assert record(sets, "train") == DataSetRecord(name="train", source=source, num_read=10, num_kept=2, **dropped)


def test_answers_that_the_scorer_calls_equal_do_not_conflict(tmp_path: Path) -> None:
    given = {"1+1=?": ("1,000", "1000"), "2+2=?": ("\u22123", "-3"), "3+3=?": ("5.0", "5"), "4+4=?": ("5", "5.0", "6")}
    rows = [dapo(problem, answer) for problem, answers in given.items() for answer in answers]
    scorer = Integers()
    sets = load(answers=scorer, train=write(tmp_path / "dapo.jsonl", rows))
    kept = record(sets, "train")
    assert (kept.num_kept, kept.num_duplicates, kept.num_conflicting) == (3, 3, 3)
    assert {p.text: p.answer for p in sets.train} == {"1+1=?": "1,000", "2+2=?": "\u22123", "3+3=?": "5.0"}
    # One call, of what is spelled otherwise than the first alone.
    assert [("1,000", "1000"), ("5.0", "5"), ("5", "5.0"), ("5", "6")] in scorer.asked


def test_rows_of_two_sources_conflict_as_those_of_one_do(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", [dapo("1+1=?", "2"), dapo("2+2=?", "4"), dapo("5+5=?", "10")])
    others = [dapo("1+1=?", "3"), dapo("2+2=?", "4.0"), dapo("5+5=?", "ten"), dapo("3+3=?", "6")]
    sets = load(train=first + write(tmp_path / "2.jsonl", others))
    assert {p.text for p in sets.train} == {"2+2=?", "5+5=?", "3+3=?"}
    records = [each for each in sets.records if each.name == "train"]
    counts = [(r.num_read, r.num_kept, r.num_conflicting, r.num_duplicates, r.num_unparseable) for r in records]
    assert counts == [(3, 2, 1, 0, 0), (4, 1, 1, 1, 1)]


def test_rows_without_a_problem_are_counted_and_the_first_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        dapo("1+1=?", "2"),
        {**dapo("", "2"), "prompt": None},
        dapo("\u200b", "2"),
        dapo(DAPO_TEXT.format(""), "2"),
        dapo("solve:", "2"),  # the instruction around nothing
        {**dapo("", "2"), "prompt": []},
        {**dapo("2+2=?", "4"), "reward_model": None},  # without a usable answer
    ]
    with caplog.at_level(logging.WARNING):
        sets = load(train=write(tmp_path / "dapo.jsonl", rows), instruction="solve: {problem}")
    kept = record(sets, "train")
    assert (kept.num_read, kept.num_kept, kept.num_empty, kept.num_unparseable) == (7, 1, 5, 1)
    assert "data.train: 5 rows have no usable problem, the first: row 2 of " in caplog.text
    assert "prompt must be a list of turns, got None" in caplog.text


def chat(*said: tuple[str, str], answer: str = "2") -> Row:
    return {**dapo("", answer), "prompt": [{"role": role, "content": text} for role, text in said]}


def test_all_turns_of_a_chat_are_rendered_and_name_it(tmp_path: Path) -> None:
    one = chat(("system", "be brief"), ("user", "1+1=?"), ("assistant", "2"), ("user", "2+2=?"), answer="4")
    other = chat(("system", "be kind"), ("user", "1+1=?"), ("assistant", "2"), ("user", "2+2=?"), answer="5")
    source = write(tmp_path / "rows.jsonl", [one, other])
    sets = load(train=source, instruction="solve {problem}", max_prompt_tokens=128)
    assert record(sets, "train").num_kept == 2  # they differ in their system turns: no conflict
    (brief,) = [p for p in sets.train if p.answer == "4"]
    assert TOKENIZER.decode(list(brief.token_ids)) == (
        "<|im_start|><|system|>be brief<|im_end|><|im_start|><|user|>1+1=?<|im_end|>"
        "<|im_start|><|assistant|>2<|im_end|><|im_start|><|user|>solve 2+2=?<|im_end|><|im_start|><|assistant|>"
    )
    assert brief.text == "system: be brief\n\nuser: 1+1=?\n\nassistant: 2\n\nuser: 2+2=?"
    assert brief.id == prompt_id(brief.text)


def test_training_gives_up_what_a_draft_or_the_validation_set_has_whatever_is_said_before_it(tmp_path: Path) -> None:
    validation = write(tmp_path / "aime.jsonl", [{"problem": "9+9=?", "answer": "18"}])
    rows = [chat(("system", "be brief"), ("user", "9+9=?"), answer="18"), dapo("1+1=?", "2")]
    sets = load(train=write(tmp_path / "rows.jsonl", rows), validation=validation)
    assert [p.text for p in sets.train] == ["1+1=?"]
    assert record(sets, "train").num_held_out == 1
    draft = write(tmp_path / "draft.jsonl", [dapo("1+1=?", "2")])
    train = write(tmp_path / "train.jsonl", [dapo("1+1=?", "2"), dapo("2+2=?", "4")])
    sets = load(train=train, draft_in_domain=draft)
    assert [p.text for p in sets.train] == ["2+2=?"]
    assert record(sets, "train").num_held_out == 1


@pytest.mark.parametrize(
    ("system", "reason"),
    [
        ("raise_exception('not supported')", "chat template refuses the turns system, user (not supported)"),
        ("''", "chat template leaves out the system turn"),
    ],
    ids=["raises", "ignores"],
)
def test_turns_that_the_chat_template_does_not_take_are_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, system: str, reason: str
) -> None:
    tokenizer = build_tokenizer(max_length=256)
    turn = f"{{{{- {system} if m.role == 'system' else m.content -}}}}"
    tokenizer.chat_template = f"{{%- for m in messages -%}}{turn}{{%- endfor -%}}"
    chatty = chat(("system", "be brief"), ("user", "2+2=?"), answer="4")
    with caplog.at_level(logging.WARNING):
        sets = load(tokenizer=tokenizer, train=write(tmp_path / "a.jsonl", [dapo("1+1=?", "2"), chatty]))
    assert (record(sets, "train").num_kept, record(sets, "train").num_empty) == (1, 1)
    assert reason in caplog.text
    with pytest.raises(ConfigError, match=r"data\.train must leave at least one prompt, got 0; found .*chat template"):
        load(tokenizer=tokenizer, train=write(tmp_path / "b.jsonl", [chatty]))


def test_synthetic_sets_load_by_the_same_code_and_are_accounted_for() -> None:
    sets = load(num_validation_problems=5)
    train = record(sets, "train")
    # 20 problems x 3 copies, 2 conflicting rows, 1 leaked validation problem; a conflict drops its 3 copies as well.
    assert (train.num_read, train.num_conflicting, train.num_held_out) == (63, 8, 1)
    assert (train.num_kept, train.num_duplicates) == (18, 36)
    drafts = ["draft_in_domain", "draft_general", "draft_general"]
    assert [each.name for each in sets.records] == ["validation", *drafts, "train"]
    for found in sets.records:
        dropped = found.num_duplicates + found.num_conflicting + found.num_unparseable + found.num_empty
        assert found.num_read == found.num_kept + dropped + found.num_too_long + found.num_held_out
    assert all(prompt.answer == "" for prompt in sets.draft_general)


ULTRACHAT = {"messages": [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]}
MAGPIE = {"conversations": [{"from": "human", "value": "1+1=?"}, {"from": "gpt", "value": "2"}]}


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (dapo("1+1=?", "2"), "2"),
        (dapo(DAPO_TEXT.format("1+1=?"), "2"), "2"),
        ({"prompt": "1+1=?", "solution": "2", "source_prompt": TURN, "reward_model": {"ground_truth": "2"}}, "2"),
        ({"id": 1, "problem": "1+1=?", "solution": "so 2", "answer": "2", "url": "u", "year": "2024"}, "2"),
        ({"ID": "2024-I-1", "Problem": "1+1=?", "Solution": "so 2", "Answer": 2}, "2"),
        ({"question": "1+1=?", "answer": "1 and 1 make <<1+1=2>>2.\n#### 1,004"}, "1,004"),
        ({"problem": "1+1=?", "solution": "Not \\boxed{1}, but $\\boxed{\\frac{1} 2}$."}, "\\frac{1} 2"),
        ({"problem": "1+1=?", "solution": "No box, or \\boxed{one without an end"}, ""),
        ({"prompt": "1+1=?", "prompt_id": "a", **ULTRACHAT}, ""),
        ({"instruction": "1+1=?", "response": "2", **MAGPIE}, ""),
    ],
    ids=[
        *("dapo", "dapo-wrapped", "open-r1", "aime-h4", "aime-maxwell-jia"),
        *("gsm8k", "math", "math without an answer", "ultrachat", "magpie"),
    ],
)
def test_every_schema_gives_the_bare_problem_and_its_answer_if_it_has_any(
    tmp_path: Path, row: Row, answer: str
) -> None:
    sets = load(draft_general=write(tmp_path / "rows.jsonl", [row]))
    assert [(p.text, p.answer, p.id) for p in sets.draft_general] == [("1+1=?", answer, "b9ab5b7f58369cf5")]
    assert prompt_id(" 1+1=?\n") == "b9ab5b7f58369cf5"


def test_max_rows_bounds_the_rows_read_whose_order_follows_the_seed_alone(tmp_path: Path) -> None:
    rows = [dapo(f"{n}+1=?", str(n + 1)) for n in range(20)]
    forward, backward = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows[::-1])
    sets = load(train=(replace(forward[0], max_rows=5),))
    assert (record(sets, "train").num_read, len(sets.train)) == (5, 5)
    first = load(train=forward).train
    assert load(train=backward).train == first
    assert load(train=forward, seed=1).train != first


def test_prompt_sets_are_read_back_as_they_were_written_with_what_rows_hold_for_a_reward(tmp_path: Path) -> None:
    bare = {name: cell for name, cell in dapo("2+2=?", "4").items() if name in ("prompt", "reward_model")}
    with_extras, without = (write(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate((dapo("1+1=?", "2"), bare)))
    sets = load(train=(*with_extras, *without))
    write_prompt_sets(sets, tmp_path / "kept")
    for found in (sets, read_prompt_sets(tmp_path / "kept")):
        assert {each.text: (each.data_source, each.extra) for each in found.train} == {
            "1+1=?": ("math_dapo", {"index": "0", "prompt_end": OPENING}),
            "2+2=?": ("", {"prompt_end": OPENING}),
        }
    sets = load()
    write_prompt_sets(sets, tmp_path / "sets")
    assert read_prompt_sets(tmp_path / "sets") == sets


def test_a_stream_gives_each_prompt_once_an_epoch_in_batches_that_need_only_the_step() -> None:
    stream = PromptStream(prompts=tuple(prompt(f"{n}=?") for n in range(6)), batch_size=2, seed=0)
    epochs = [[p.text for step in range(3 * e, 3 * e + 3) for p in stream.batch(step)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"{n}=?" for n in range(6)]
    assert epochs[0] != epochs[1]
    resumed = PromptStream(prompts=stream.prompts, batch_size=2, seed=0)
    assert [resumed.batch(step) for step in (4, 5)] == [stream.batch(step) for step in (4, 5)]
    # Nor does a batch have a prompt twice where epochs do not fill batches.
    stream = PromptStream(prompts=tuple(prompt(f"{n}=?") for n in range(5)), batch_size=3, seed=0)
    assert all(len({p.id for p in stream.batch(step)}) == 3 for step in range(20))
    with pytest.raises(ConfigError, match=r"prompts_per_step must lie in \[1, 1\], the number of training .*, got 8"):
        PromptStream(prompts=(prompt("1=?"),), batch_size=8, seed=0)


def test_further_prompts_of_a_step_are_none_that_it_has_and_need_only_the_step() -> None:
    prompts = tuple(prompt(f"{n}=?") for n in range(9))
    stream, resumed = (PromptStream(prompts=prompts, batch_size=2, seed=0) for _ in range(2))
    found = []
    for step in range(8):
        batches = [stream.batch(step), *(stream.further(step, number) for number in (1, 2, 3))]
        assert len({each.id for batch in batches for each in batch}) == 8
        found.append(batches[1:])
    assert [resumed.further(step, 2) for step in (7, 3)] == [found[7][1], found[3][1]]
    assert len({batches[0] for batches in found}) > 4
    assert PromptStream(prompts=prompts, batch_size=2, seed=1).further(0, 1) != found[0][0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none.jsonl", r"must be a file or directory that exists, got '/none\.jsonl'"),
        ("dapo", r"must be a hub id \(owner/name\), a local file"),
    ],
)
def test_what_is_no_source_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.train {message}"):
        load(train=(SourceConfig(path=path),))


CHAT = {"prompt": "a", "prompt_id": "a", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "1=?", "label": "2"}], "must have .* got label, question in .*known: .*DAPO.*AIME-2024"),
        ([{"prompt": "1=?", "reward_model": {}}], "must follow the schema DAPO-Math-17k .* in row 1 of"),
        ([dapo("1+1=?", "two"), dapo("2+2=?", "four")], r"must have parseable answers, got \['four', 'two'\]"),
        ([CHAT], "must have answers, got .* with the schema UltraChat-200k"),
        ([dapo("1+" * 40 + "1=?", "41")], "must leave at least one prompt, got 0; found .*num_too_long=1"),
    ],
    ids=["columns", "shape", "answers", "chats", "length"],
)
def test_rows_without_use_are_refused_with_what_there_is(tmp_path: Path, rows: list[Row], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.train {message}"):
        load(train=write(tmp_path / "rows.jsonl", rows))


def test_another_number_of_validation_problems_says_what_was_found(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"problem": "1+1=?", "answer": "2"}] * 32)
    message = r"data\.validation must give 30 unique problems, got 1; found .*num_read=32.*num_duplicates=31"
    with pytest.raises(ConfigError, match=message):
        load(validation=source, num_validation_problems=30)


def numbered(name: str, count: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(id=f"{name}{i}", text=f"{name}{i}", token_ids=(1,), answer="1") for i in range(count))


def source_record(name: str, *, num_read: int, num_kept: int, **dropped: int) -> DataSetRecord:
    counts = {"num_duplicates": 0, "num_conflicting": 0, "num_unparseable": 0, "num_too_long": 0, "num_held_out": 0}
    return DataSetRecord(name=name, source="rows", num_read=num_read, num_kept=num_kept, **{**counts, **dropped})


SETS = PromptSets(
    train=numbered("train", 4),
    draft_in_domain=numbered("in domain", 10),
    draft_general=numbered("general", 6),
    validation=numbered("validation", 1),
    records=(
        source_record("train", num_read=4, num_kept=4),
        source_record("draft_in_domain", num_read=15, num_kept=9, num_duplicates=3, num_held_out=2, num_empty=1),
        source_record("draft_general", num_read=9, num_kept=5, num_duplicates=4),
        source_record("draft_general", num_read=2, num_kept=1, num_duplicates=1),
    ),
)


@rows(
    """
draft_in_domain: draft.num_prompts + draft.num_heldout_prompts: 11
    draft.num_prompts + draft.num_heldout_prompts must be <= 10, the number of distinct prompts in data.draft_in_domain,
    got 11; of 15 rows read 3 duplicates, 2 in another set, 1 without a usable problem were dropped: lower it, or read
    more rows (synthetic: raise data.synthetic.num_draft_rows; else add a source or raise its max_rows)
draft_general: draft.num_prompts: 7
    draft.num_prompts must be <= 6, the number of distinct prompts in data.draft_general, got 7; of 11 rows read 5
    duplicates were dropped: lower it, or read more rows (synthetic: raise data.synthetic.num_draft_rows; else add a
    source or raise its max_rows)
train: grpo.prompts_per_step: 5
    grpo.prompts_per_step must be <= 4, the number of distinct prompts in data.train, got 5; of 4 rows read none were
    dropped: lower it, or read more rows (synthetic: raise data.synthetic.num_train_problems; else add a source or raise
    its max_rows)
"""
)
def test_a_set_that_is_too_small_is_refused_with_why(refusal: Refusal, given: str, expected: str) -> None:
    split, field, value = given.split(": ")
    require: Any = require_size
    require(SETS, split, field, int(value) - 1)
    assert refusal(lambda: require(SETS, split, field, int(value))) == expected


def test_a_set_that_is_too_small_for_a_batch_of_groups_is_refused() -> None:
    require_size(SETS, "train", "tuning.batch_sizes", 32, rollouts_per_prompt=8)
    rule = r"^tuning\.batch_sizes must be <= 32: 8 rollouts \(grpo\.group_size\) for each of the 4 distinct prompts"
    with pytest.raises(ConfigError, match=rf"{rule} in data\.train, got 40"):
        require_size(SETS, "train", "tuning.batch_sizes", 40, rollouts_per_prompt=8)


def test_sets_that_share_a_problem_are_refused() -> None:
    train, drafts = (prompt("1+1=?"),), {"draft_in_domain": (prompt("2+2=?"),), "draft_general": (prompt("a"),)}
    with pytest.raises(ConfigError, match=r"data\.validation must share no problem with train, got '1\+1=\?'"):
        PromptSets(train=train, **drafts, validation=train, records=())
