"""The schemas of the data sets that Slipstream reads: known by their columns, never by their name."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.config import ConfigError

Row = Mapping[str, Any]

# What DAPO-Math-17k puts around each problem; the policy gets `data.instruction` instead.
_DAPO_WRAPPER = re.compile(
    r"\A\s*Solve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.(?P<problem>.*?)"
    r"(?:Remember to put your answer on its own line after \"Answer:\"\.)?\s*\Z",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """How to read a problem and, where the set has one, its answer from a row with these columns."""

    name: str
    columns: tuple[str, ...]
    problem: Callable[[Row], Any]
    answer: Callable[[Row], Any] | None


def _first_user_turn(turns: Any, *, speaker: str, text: str, user: str) -> Any:
    return next(turn[text] for turn in turns if turn[speaker] == user)


SCHEMAS = (
    Schema(
        name="DAPO-Math-17k, processed (open-r1)",
        columns=("prompt", "solution", "source_prompt"),
        problem=lambda row: row["prompt"],
        answer=lambda row: row["solution"],
    ),
    Schema(
        name="DAPO-Math-17k (BytedTsinghua)",
        columns=("prompt", "reward_model"),
        problem=lambda row: _first_user_turn(row["prompt"], speaker="role", text="content", user="user"),
        answer=lambda row: row["reward_model"]["ground_truth"],
    ),
    Schema(
        name="UltraChat-200k",
        columns=("prompt", "prompt_id", "messages"),
        problem=lambda row: _first_user_turn(row["messages"], speaker="role", text="content", user="user"),
        answer=None,
    ),
    Schema(
        name="Magpie",
        columns=("conversations",),
        problem=lambda row: _first_user_turn(row["conversations"], speaker="from", text="value", user="human"),
        answer=None,
    ),
    Schema(
        name="AIME-2024 (HuggingFaceH4)",
        columns=("problem", "answer"),
        problem=lambda row: row["problem"],
        answer=lambda row: row["answer"],
    ),
    Schema(
        name="AIME-2024 (Maxwell-Jia)",
        columns=("Problem", "Answer"),
        problem=lambda row: row["Problem"],
        answer=lambda row: row["Answer"],
    ),
)
"""In the order in which they are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One row as every schema gives it: `answer` is "" for a set without answers."""

    problem: str
    answer: str


def recognise(columns: Collection[str], *, field: str, source: str) -> Schema:
    """The schema whose columns are all among `columns`.

    Raises:
        ConfigError: none fits; the message lists the columns found and the schemas known.
    """
    for schema in SCHEMAS:
        if set(schema.columns) <= set(columns):
            return schema
    known = "; ".join(f"{schema.name}: {', '.join(schema.columns)}" for schema in SCHEMAS)
    found = ", ".join(sorted(columns))
    raise ConfigError(f"{field} must have the columns of a known schema, got {found} in {source}; known: {known}")


def read_item(schema: Schema, row: Row, *, field: str, where: str) -> Item:
    """Read one row.

    Raises:
        ConfigError: a column holds something else than its schema says.
    """
    try:
        problem = schema.problem(row)
        answer = "" if schema.answer is None else schema.answer(row)
    except (KeyError, TypeError, StopIteration) as error:
        found = {name: row[name] for name in schema.columns}
        raise ConfigError(f"{field} must follow the schema {schema.name}, got {found!r} in {where}") from error
    if not isinstance(problem, str):
        raise ConfigError(f"{field} must have text as its problems, got {problem!r} in {where}")
    return Item(problem=_bare(problem), answer="" if answer is None else str(answer).strip())


def normalise(text: str) -> str:
    """Text with equal content spelled equally: Unicode NFKC, and one space for each run of white space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _bare(problem: str) -> str:
    wrapped = _DAPO_WRAPPER.match(problem)
    return (wrapped["problem"] if wrapped else problem).strip()
