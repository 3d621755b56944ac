"""Schemas of the data sets that Slipstream reads, recognised by their columns.

The prompt of a chat ends with its last user turn, which is the problem. The system message and earlier turns are its
context. Later turns are another model's response, which the policy replaces with its own.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import accumulate
from typing import Any

from slipstream.config import ConfigError, require
from slipstream.data.config import ColumnsConfig, SourceConfig

Row = Mapping[str, Any]
Turn = tuple[str, str]
"""Role of a speaker (`system`, `user` or `assistant`), and the text."""

# Wrapper of DAPO-Math-17k around each problem; the policy gets `data.instruction` instead.
_DAPO_WRAPPER = re.compile(
    r"\A\s*Solve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.(?P<problem>.*?)"
    r"(?:Remember to put your answer on its own line after \"Answer:\"\.)?\s*\Z",
    re.DOTALL,
)
_SPEAKERS = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}
# Hangul fillers, which have no width, and the Braille blank.
_FILLERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
# Zero-width spaces, joiners and direction marks. Invisible operators such as U+2062 (times) carry meaning.
_ZERO_WIDTH = frozenset("\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u2060\u2066\u2067\u2068\u2069\ufeff")
# Compatibility forms that only look different; superscripts, fractions and circled digits are not among them.
_LOOKS = ("<wide>", "<narrow>", "<small>", "<noBreak>", "<initial>", "<medial>", "<final>", "<isolated>")


class NoProblemError(ValueError):
    """A row that gives no prompt; the message says why."""


@dataclass(frozen=True, slots=True)
class Schema:
    """Columns of a data set, with functions that read a row's turns and, where it has one, its answer."""

    name: str
    columns: tuple[str, ...]
    turns: Callable[[Row], list[Turn]]
    answer: Callable[[Row], Any] | None
    worked: str | None = None  # column whose text ends with the answer, for `answer_after` in place of `answer`
    extra: tuple[str, ...] = ()  # of `columns`, those that are put into a reward function's `extra_info`


def _text(column: str) -> Callable[[Row], list[Turn]]:
    """Return a reader of one user turn from the text in `column`."""

    def turns(row: Row) -> list[Turn]:
        text = row.get(column)
        if not isinstance(text, str):
            raise NoProblemError(f"{column} must be text, got {text!r}")
        return [("user", _bare(text))]

    return turns


def _chat(column: str, *, speaker: str, text: str) -> Callable[[Row], list[Turn]]:
    """Return a reader of the chat in `column` up to its last user turn, without empty system turns."""

    def turns(row: Row) -> list[Turn]:
        chat = row.get(column)
        if not isinstance(chat, list):
            raise NoProblemError(f"{column} must be a list of turns, got {chat!r}")
        speakers = [_SPEAKERS.get(str(turn.get(speaker))) if isinstance(turn, Mapping) else None for turn in chat]
        end = max((index + 1 for index, role in enumerate(speakers) if role == "user"), default=0)
        found = [_turn(turn, speaker=speaker, text=text) for turn in chat[:end]]
        return [turn for turn in found if turn[0] != "system" or not is_blank(turn[1])]

    return turns


def _turn(turn: Any, *, speaker: str, text: str) -> Turn:
    role, said = (turn.get(speaker), turn.get(text)) if isinstance(turn, Mapping) else (None, None)
    known = _SPEAKERS.get(role) if isinstance(role, str) else None
    if known is None:
        raise NoProblemError(f"{speaker} of a turn must be one of {', '.join(_SPEAKERS)}, got {turn!r}")
    if not isinstance(said, str):
        if known == "system" and said is None:
            return known, ""
        raise NoProblemError(f"{text} of a turn must be text, got {turn!r}")
    return known, _bare(said) if known == "user" else said


def _last_box(text: str) -> str:
    """Return what stands in the last `\\boxed{…}`; an IndexError where there is none that ends."""
    inside = text.split("\\boxed{")[1:][-1]
    depths = accumulate({"{": 1, "}": -1}.get(char, 0) for char in inside)
    ends = [end for end, depth in enumerate(depths) if depth < 0]
    return inside[: ends[0]]


def _after(mark: str, answer: Any) -> Any:
    """Return what stands after the last `mark` of a text; another value, and a text without the mark, as it is."""
    return answer.rpartition(mark)[2] if isinstance(answer, str) else answer


SCHEMAS = (
    Schema(
        "DAPO-Math-17k, processed (open-r1)",
        ("prompt", "solution", "source_prompt"),
        _text("prompt"),
        lambda row: row["solution"],
    ),
    Schema(
        "DAPO-Math-17k (BytedTsinghua)",
        ("prompt", "reward_model"),
        _chat("prompt", speaker="role", text="content"),
        lambda row: row["reward_model"]["ground_truth"],
    ),
    Schema(
        "UltraChat-200k", ("prompt", "prompt_id", "messages"), _chat("messages", speaker="role", text="content"), None
    ),
    Schema("Magpie", ("conversations",), _chat("conversations", speaker="from", text="value"), None),
    Schema("GSM8K", ("question", "answer"), _text("question"), lambda row: _after("####", row["answer"]), "answer"),
    Schema("AIME-2024 (HuggingFaceH4)", ("problem", "answer"), _text("problem"), lambda row: row["answer"]),
    Schema("AIME-2024 (Maxwell-Jia)", ("Problem", "Answer"), _text("Problem"), lambda row: row["Answer"]),
    Schema("MATH", ("problem", "solution"), _text("problem"), lambda row: _last_box(row["solution"]), "solution"),
)
"""Known schemas in order of precedence."""
FOR_REWARDS = ("data_source", "extra_info")
"""Columns that a reward function gets, where a set of whatever schema has them."""
REASONING_GYM_ROWS = Schema(
    "reasoning-gym", ("question", "answer", "data_source", "extra_info"), _text("question"), lambda row: row["answer"]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One row of any schema; `answer` is None where the set or the row has none."""

    context: tuple[Turn, ...]  # turns before the problem
    problem: str
    answer: str | None
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The problem, with its context where there is any."""
        if not self.context:
            return self.problem
        return "\n\n".join(f"{role}: {said}" for role, said in (*self.context, ("user", self.problem)))


def schema_of(source: SourceConfig, columns: Collection[str], *, field: str) -> Schema:
    """Return the schema that the source declares, else the first known one whose columns are all among `columns`."""
    if source.columns is None:
        schema = next((schema for schema in SCHEMAS if set(schema.columns) <= set(columns)), None)
    else:
        schema = _declared(source.columns, columns, f"{field}.columns", source.path)
    if schema is None:
        known = "; ".join(f"{schema.name}: {', '.join(schema.columns)}" for schema in SCHEMAS)
        raise ConfigError(
            f"{field} must have the columns of a known schema, got {', '.join(sorted(columns))} in {source.path}; "
            f"name them in `columns`; known: {known}"
        )
    mark, worked = source.answer_after, schema.worked
    answer = schema.answer if worked is None else lambda row: row[worked]
    if mark is None:
        return schema
    if answer is None:
        raise ConfigError(f"{field}.answer_after must be left out where there is no answer, got {mark!r}")
    return replace(schema, answer=lambda row: _after(mark, said) if mark in (said := str(answer(row))) else None)


def _declared(names: ColumnsConfig, columns: Collection[str], field: str, path: str) -> Schema:
    named = {"problem": names.problem, **({} if names.answer is None else {"answer": names.answer})}
    for key, column in (*named.items(), *(("extra", column) for column in names.extra)):
        rule = f"must be one of {', '.join(sorted(columns))}, the columns of {path}"
        require(column in columns, f"{field}.{key}", rule, column)
    answer = names.answer
    text, chat = _text(names.problem), _chat(names.problem, speaker="role", text="content")
    return Schema(
        "of `columns`",
        (*named.values(), *names.extra),
        lambda row: (chat if isinstance(row.get(names.problem), list) else text)(row),
        None if answer is None else lambda row: row[answer],
        extra=names.extra,
    )


def read_item(schema: Schema, row: Any, *, data_source: str | None = None) -> Item:
    """Read one row, whose `data_source` is its own unless one is given.

    Raises:
        NoProblemError: a column's content does not follow the schema, or there is no user turn.
    """
    if not isinstance(row, Mapping):
        raise NoProblemError(f"a row must have columns, got {row!r}")
    turns = schema.turns(row)
    if not turns:
        raise NoProblemError("there is no user turn")
    given = row.get("extra_info")
    extra = {**(given if isinstance(given, dict) else {}), **{name: row[name] for name in schema.extra}}
    return Item(
        context=tuple(turns[:-1]),
        problem=turns[-1][1],
        answer=_answer(schema, row),
        data_source=str(data_source or row.get("data_source") or ""),
        extra=json.loads(json.dumps(extra, default=str)),
    )


def check_asks(item: Item, *, instruction: str) -> None:
    """Raise a `NoProblemError` where a turn is blank, or the problem only repeats `instruction`."""
    if is_blank(item.problem):
        raise NoProblemError("the problem is empty")
    if any(is_blank(said) for _, said in item.context):
        raise NoProblemError("a turn before the problem is empty")
    if normalise(item.problem) == normalise(instruction.replace("{problem}", "")):
        raise NoProblemError("the problem is data.instruction alone")


def normalise(text: str) -> str:
    """Spell equal content equally: NFC, one space for each run of white space, no zero-width characters.

    Forms that only look different, such as full-width ones, become plain. Superscripts, fractions and other forms that
    NFKC would decompose keep their meaning: `2\u00b3` is not `23`, and `1\u00bd` is not `11/2`.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(_PLAIN))
    return " ".join(text.split())


def is_blank(text: str) -> bool:
    """Return True if `text` shows nothing."""
    return all(map(_is_invisible, text))


class _PlainForms(dict[int, str]):
    """Replacements of characters for `normalise`, computed on first use."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        tag = unicodedata.decomposition(char).partition(" ")[0]
        plain = unicodedata.normalize("NFKC", char)
        if char in _ZERO_WIDTH:
            char = ""
        elif tag in _LOOKS or (tag == "<compat>" and char.isalpha() and plain.isalpha()):  # the latter: ligatures
            char = plain
        self[code] = char
        return char


_PLAIN = _PlainForms({ord("\u2212"): "-", ord("\u2010"): "-", ord("\u2011"): "-", ord("\u2026"): "..."})


def _is_invisible(char: str) -> bool:
    return unicodedata.category(char)[0] in "ZM" or unicodedata.category(char) in ("Cc", "Cf") or char in _FILLERS


def _answer(schema: Schema, row: Row) -> str | None:
    """Return the answer of a row; None where it is missing (or NaN), or neither text nor a number."""
    if schema.answer is None:
        return None
    try:
        answer = schema.answer(row)
    except (AttributeError, KeyError, TypeError, IndexError):
        return None
    is_given = isinstance(answer, str | int | float | Decimal) and not isinstance(answer, bool) and answer == answer
    return str(answer).strip() if is_given else None


def _bare(problem: str) -> str:
    wrapped = _DAPO_WRAPPER.match(problem)
    return (wrapped["problem"] if wrapped else problem).strip()
