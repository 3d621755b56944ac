"""Reading of a row: turns, answer, blank problems, and texts that are the same."""

import math
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from slipstream.data.config import SourceConfig
from slipstream.data.schemas import SCHEMAS, Item, NoProblemError, check_asks, is_blank, normalise, read_item, schema_of

DAPO = next(schema for schema in SCHEMAS if schema.name == "DAPO-Math-17k (BytedTsinghua)")
MAGPIE = next(schema for schema in SCHEMAS if schema.name == "Magpie")
AIME = next(schema for schema in SCHEMAS if schema.name == "AIME-2024 (HuggingFaceH4)")
DAPO_TEXT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def turns(*said: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in said]


def dapo(*said: tuple[str, Any], answer: Any = "2") -> Item:
    return read_item(DAPO, {"prompt": turns(*said), "reward_model": {"ground_truth": answer}})


ALIKE = [("1  +\n1", " 1 + 1 "), ("\uff11\uff12\uff0b\uff13", "12+3"), ("e\u0301", "\u00e9"), ("5\u00a0cm", "5 cm")]
ALIKE += [("1\u200b0\ufeff0", "100"), ("of\ufb01ce", "office"), ("3 \u2212 2", "3 - 2"), ("1, 2, \u2026", "1, 2, ...")]
# Half-width katakana and its mark; micro sign and Greek letter.
ALIKE += [("\uff76\uff9e", "\u30ac"), ("\u00b5", "\u03bc")]
# Exponents, indices, fractions; a circled digit, the reals, a bold x (a vector), invisible times, a Roman number.
OTHER = [("2\u00b3", "23"), ("x\u2082", "x2"), ("1\u00bd", "11/2"), ("1\u00bd", "11\u20442"), ("\u2460", "1")]
OTHER += [("\U0001d431", "x"), ("m\u00b2", "m2"), ("3\u2062x", "3x"), ("\u2163", "IV"), ("1\u20443", "1/3"), ("X", "x")]
OTHER += [("10\u207b\u00b9", "10-1"), ("\u33a1", "m2"), ("\u211d", "R")]


@pytest.mark.parametrize(("left", "right", "alike"), [*((*p, True) for p in ALIKE), *((*p, False) for p in OTHER)])
def test_texts_that_differ_in_their_looks_alone_are_equal(left: str, right: str, alike: bool) -> None:
    assert (normalise(left) == normalise(right)) is alike
    assert normalise(normalise(left)) == normalise(left)


BLANK = ["", " \n\t", "\u200b\u200d\ufeff", "\u00ad\u2060", "\u3164", "\u2800 \u2800", "\u3000", "\u2062"]
BLANK += ["\u202e\u202c", "\ufe0f", "\x00\x07", "\u200b" * 500]
ASKING = ["?", "0", "\u221e", "$x$", "\U0001f642", "\u4f60", "Problem: 1", "$+$", "\\boxed{2}", "step by step: 1+1"]
ASKING += ["x" * 500]


@pytest.mark.parametrize(("text", "blank"), [*((each, True) for each in BLANK), *((each, False) for each in ASKING)])
def test_what_shows_nothing_is_blank(text: str, blank: bool) -> None:
    assert is_blank(text) is blank


def test_a_prompt_is_the_whole_chat_up_to_its_last_user_turn_whatever_follows_and_whoever_speaks() -> None:
    before = (("system", "Be brief."), ("user", " 1+1=? "), ("assistant", "2"))
    item = dapo(*before, ("user", "and 2+2=?"), ("assistant", "4"))
    assert item.context == (("system", "Be brief."), ("user", "1+1=?"), ("assistant", "2"))
    assert item.problem == "and 2+2=?"
    assert item.text == "system: Be brief.\n\nuser: 1+1=?\n\nassistant: 2\n\nuser: and 2+2=?"
    assert dapo(("user", "1+1=?")).text == dapo(("system", " "), ("user", "1+1=?")).text == "1+1=?"
    assert dapo(("system", None), ("user", "1+1=?")).context == ()
    assert dapo(("user", "1+1=?"), ("assistant", None), ("tool", "2"), ("assistant", "2")).text == "1+1=?"
    chat = [("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "c")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in chat]}
    assert read_item(MAGPIE, row).context == (("system", "s"), ("user", "a"), ("assistant", "b"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([], "there is no user turn"),
        ([("system", "Be brief."), ("assistant", "Hello")], "there is no user turn"),
        ([("user", "")], "the problem is empty"),
        ([("user", DAPO_TEXT.format("\u200b"))], "the problem is empty"),
        ([("user", "\u200b"), ("assistant", "Hello"), ("user", "1+1=?")], "a turn before the problem is empty"),
        ([("user", "1+1=?"), ("assistant", " "), ("user", "why?")], "a turn before the problem is empty"),
        ([("user", None)], "content of a turn must be text"),
        ([("user", [{"type": "text", "text": "1+1=?"}])], "content of a turn must be text"),
        ([("tool", "2"), ("user", "1+1=?")], "role of a turn must be one of system, user"),
        ([(None, "2"), ("user", "1+1=?")], "role of a turn must be one of"),
    ],
)
def test_a_chat_that_asks_nothing_gives_the_reason(said: list[tuple[str, Any]], message: str) -> None:
    with pytest.raises(NoProblemError, match=message):
        check_asks(dapo(*said), instruction="{problem}")


def test_the_instruction_around_nothing_asks_nothing() -> None:
    with pytest.raises(NoProblemError, match=r"data\.instruction alone"):
        check_asks(dapo(("user", "Solve  this:")), instruction="Solve this: {problem}")
    check_asks(dapo(("user", "Solve this: 1")), instruction="Solve this: {problem}")


@pytest.mark.parametrize("problem", [None, 5, ["1+1=?"], {"text": "1+1=?"}, True, "1+1=?"])
def test_a_problem_or_a_chat_of_another_type_gives_the_reason(problem: object) -> None:
    if not isinstance(problem, str):
        with pytest.raises(NoProblemError, match="problem must be text, got"):
            read_item(AIME, {"problem": problem, "answer": "2"})
    with pytest.raises(NoProblemError):
        read_item(DAPO, {"prompt": problem, "reward_model": {"ground_truth": "2"}})


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (" 2 ", "2"),
        (2, "2"),
        (2.5, "2.5"),
        (Decimal("1.50"), "1.50"),
        (None, None),
        (math.nan, None),
        (True, None),
        (["2"], None),
        ({"a": 2}, None),
    ],
)
def test_an_answer_is_text_or_a_number_of_a_reward_model(answer: object, read: str | None) -> None:
    assert dapo(("user", "1+1=?"), answer=answer).answer == read
    for model in (None, {}, "2"):
        assert read_item(DAPO, {"prompt": turns(("user", "1+1=?")), "reward_model": model}).answer is None


@pytest.mark.parametrize("names", [("question", "answer"), ("problem", "solution"), ("problem", "answer")])
@pytest.mark.parametrize(("text", "answer"), [("\\boxed{7} or #### 8 #### 9", "9"), ("\\boxed{7}", None)])
def test_a_mark_is_looked_for_in_the_whole_answer_of_a_known_schema(
    names: tuple[str, str], text: str, answer: str | None
) -> None:
    schema = schema_of(SourceConfig(path="here", answer_after="####"), names, field="data.train")
    assert read_item(schema, dict(zip(names, ("1+1=?", text), strict=True))).answer == answer


def test_a_chat_brings_what_a_reward_function_reads() -> None:
    row = {
        "prompt": [{"role": "user", "content": "Add."}],
        "reward_model": {"ground_truth": "4"},
        "data_source": "math_dapo",
        "extra_info": {"index": 7, "when": date(2026, 11, 25)},
    }
    item = read_item(DAPO, row)
    assert (item.data_source, item.extra) == ("math_dapo", {"index": 7, "when": "2026-11-25"})
    assert read_item(DAPO, {**row, "data_source": None, "extra_info": None}).extra == {}
