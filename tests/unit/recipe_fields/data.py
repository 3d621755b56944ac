"""Probes of the data: which rows are read, kept and rendered."""

import typing
from collections.abc import Sequence
from typing import Any

import datasets

from slipstream.data import prompts, synthetic
from slipstream.data.config import SourceConfig
from slipstream.data.prompts import PromptSets, load_prompt_sets
from slipstream.data.sources import read_rows
from slipstream.data.tokenizer import build_tokenizer, write_tokenizer
from slipstream.recipe import Recipe
from slipstream.stages import support
from tests.standins import STANDINS
from tests.unit.recipe_fields.base import Check, Probe, Tools, checks


class AnyAnswer:
    """Takes every answer that is not empty, and calls those equal that are spelled alike."""

    def gradable(self, references: Sequence[str], data_source: str) -> list[bool]:
        return [bool(each) for each in references]

    def equal(self, pairs: Sequence[tuple[str, str]], data_source: str) -> list[bool]:
        return [left == right for left, right in pairs]


def prompt_sets(recipe: Recipe, tools: Tools) -> PromptSets:
    write_tokenizer(tools.directory / "tokenizer", max_length=256)
    tokenizer, known = support.tokenizer(tools.directory / "tokenizer"), AnyAnswer()
    return load_prompt_sets(recipe.data, tokenizer=tokenizer, gradable=known.gradable, equal=known.equal)


def synthetic_rows(recipe: Recipe, _: Tools) -> object:
    config, seed = recipe.data.synthetic, recipe.data.seed
    return (
        synthetic.dapo_rows(config, split="train", seed=seed),
        synthetic.aime_rows(config, seed=seed),
        synthetic.ultrachat_rows(config, seed=seed),
    )


def synthetic_corpus(recipe: Recipe, _: Tools) -> object:
    corpus = synthetic.pretraining_corpus(recipe.data.synthetic, workload=recipe.workload, seed=recipe.data.seed)
    return [next(corpus) for _ in range(100)]


def hub_request(split: str) -> Probe:
    """What the hub is asked for by the first source of a set, and how many of three rows are kept."""

    def probe(recipe: Recipe, tools: Tools) -> object:
        asked: list[Any] = []

        def load_dataset(*names: Any, **arguments: Any) -> datasets.Dataset:
            asked.append((names, arguments))
            return datasets.Dataset.from_list([{"a": i} for i in range(3)])

        tools.patch.setattr(datasets, "load_dataset", load_dataset)
        sources: tuple[SourceConfig, ...] = getattr(recipe.data, split)
        return asked, len(read_rows(sources[0], field=f"data.{split}", seed=0).table)

    return probe


ROWS = [{"q": f"{i}+1=?", "p": f"{i}+2=?", "a": f"x # {i + 1}", "b": f"y # {i}", "level": i % 2} for i in range(6)]
TOKENIZER = build_tokenizer(max_length=256)


def own_rows(split: synthetic.Split) -> Probe:
    """What is made of the rows of one set, whose sources are on the hub or made by the stand-in of reasoning-gym."""

    def probe(recipe: Recipe, tools: Tools) -> object:
        tools.patch.syspath_prepend(str(STANDINS))
        tools.patch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(ROWS))
        known: Any = {"gradable": AnyAnswer().gradable, "equal": AnyAnswer().equal, "held_out": (), "opening": ""}
        reader = prompts._SetReader(config=recipe.data, split=split, tokenizer=TOKENIZER, **known)
        return reader.read(getattr(recipe.data, split))

    return probe


SPLITS = typing.get_args(synthetic.Split)
OWN = {"path": "a/b", "columns": {"problem": "q", "answer": "a"}, "weight": 1.0}
SECOND = {"path": "c/d", "columns": {"problem": "p", "answer": "a"}, "weight": 0.5}
OWN_CHANGES = {
    "columns.problem": {"columns": {"problem": "p", "answer": "a"}},
    "columns.answer": {"columns": {"problem": "q", "answer": "b"}},
    "columns.extra": {"columns": {"problem": "q", "answer": "a", "extra": ["level"]}},
    "answer_after": {"answer_after": "#"},
    "where": {"where": {"level": 1}},
    "weight": {"weight": 2.0},
    "data_source": {"data_source": "own"},
}
SUMS = {"path": "reasoning_gym:chain_sum"}
EXAMPLE = {"problem": "1+1=?", "response": "2"}
SOURCE = {"path": "a/b"}
CHECKS = {
    **{f"data.{split}": Check([{"path": "./missing.jsonl"}], prompt_sets) for split in SPLITS},
    **{
        f"data.{split}[].{name}": Check([{**SOURCE, name: value}], hub_request(split), {f"data.{split}": [SOURCE]})
        for split in SPLITS
        for name, value in {"path": "c/d", "subset": "en", "split": "test", "max_rows": 2}.items()
    },
    **{
        f"data.{split}[].{name}": Check(
            [{**OWN, **change}, SECOND], own_rows(split), {f"data.{split}": [OWN, SECOND], "data.max_prompt_tokens": 64}
        )
        for split in SPLITS
        for name, change in OWN_CHANGES.items()
    },
    **{
        f"data.{split}[].config": Check([{**SUMS, "config": {"size": 3}}], own_rows(split), {f"data.{split}": [SUMS]})
        for split in SPLITS
    },
    **checks("data", own_rows("train"), {"data.train": [OWN]}, system="be brief", examples=[EXAMPLE]),
    **{
        f"data.examples[].{name}": Check(
            [{**EXAMPLE, name: "3"}], own_rows("train"), {"data.train": [OWN], "data.examples": [EXAMPLE]}
        )
        for name in EXAMPLE
    },
    **checks("data", prompt_sets, chat_template_args={"enable_thinking": False}, num_validation_problems=3),
    **checks("data", prompt_sets, max_prompt_tokens=12, instruction="{problem} Solve it.", seed=1),
    **checks("data.synthetic", synthetic_rows, num_train_problems=13, num_copies=3, num_conflicting=2, num_leaked=2),
    **checks("data.synthetic", synthetic_rows, num_draft_rows=13, num_validation_problems=5),
    **checks("data.synthetic", synthetic_corpus, min_terms=4, max_terms=8, terms_decay=0.5, one_digit_rate=0.9),
    **checks(
        "data.synthetic", synthetic_corpus, subtraction_rate=0.5, noise_rate=0.5, careless_rate=0.0, general_rate=0.5
    ),
    "data.synthetic.max_term": Check(50, synthetic_corpus, {"data.synthetic.one_digit_rate": 0.5}),
}
