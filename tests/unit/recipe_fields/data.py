"""Probes of the data: which rows are read, kept and rendered."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import datasets

from slipstream.data import synthetic
from slipstream.data.config import SourceConfig
from slipstream.data.prompts import PromptSets, load_prompt_sets
from slipstream.data.sources import read_rows
from slipstream.data.tokenizer import write_tokenizer
from slipstream.recipe import Recipe
from slipstream.stages import support
from tests.unit.recipe_fields.base import Check, Probe, Tools


class AnyAnswer:
    """Takes every answer, and calls those equal that are spelled alike."""

    def gradable(self, references: Sequence[str]) -> list[bool]:
        return [True] * len(references)

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        return [left == right for left, right in pairs]


def prompt_sets(recipe: Recipe, tools: Tools) -> PromptSets:
    write_tokenizer(tools.directory / "tokenizer", max_length=256)
    return load_prompt_sets(
        recipe.data,
        tokenizer=support.tokenizer(tools.directory / "tokenizer"),
        gradable=AnyAnswer().gradable,
        equal=AnyAnswer().equal,
        directory=tools.directory / "sources",
    )


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

        def load_dataset(**arguments: Any) -> datasets.Dataset:
            asked.append(arguments)
            return datasets.Dataset.from_list([{"a": i} for i in range(3)])

        tools.patch.setattr(datasets, "load_dataset", load_dataset)
        sources: tuple[SourceConfig, ...] = getattr(recipe.data, split)
        return asked, len(read_rows(sources[0], field=f"data.{split}", seed=0))

    return probe


SPLITS = typing.get_args(synthetic.Split)
SOURCE = {"path": "a/b"}
CHECKS = {
    **{f"data.{split}": Check([{"path": "./missing.jsonl"}], prompt_sets) for split in SPLITS},
    **{
        f"data.{split}[].{name}": Check([{**SOURCE, name: value}], hub_request(split), {f"data.{split}": [SOURCE]})
        for split in SPLITS
        for name, value in {"path": "c/d", "subset": "en", "split": "test", "max_rows": 2}.items()
    },
    "data.num_validation_problems": Check(3, prompt_sets),
    "data.max_prompt_tokens": Check(12, prompt_sets),
    "data.instruction": Check("{problem} Solve it.", prompt_sets),
    "data.seed": Check(1, prompt_sets),
    "data.synthetic.num_train_problems": Check(13, synthetic_rows),
    "data.synthetic.num_copies": Check(3, synthetic_rows),
    "data.synthetic.num_conflicting": Check(2, synthetic_rows),
    "data.synthetic.num_leaked": Check(2, synthetic_rows),
    "data.synthetic.num_draft_rows": Check(13, synthetic_rows),
    "data.synthetic.num_validation_problems": Check(5, synthetic_rows),
    "data.synthetic.min_terms": Check(4, synthetic_corpus),
    "data.synthetic.max_terms": Check(8, synthetic_corpus),
    "data.synthetic.terms_decay": Check(0.5, synthetic_corpus),
    "data.synthetic.max_term": Check(50, synthetic_corpus, {"data.synthetic.one_digit_rate": 0.5}),
    "data.synthetic.one_digit_rate": Check(0.9, synthetic_corpus),
    "data.synthetic.subtraction_rate": Check(0.5, synthetic_corpus),
    "data.synthetic.noise_rate": Check(0.5, synthetic_corpus),
    "data.synthetic.careless_rate": Check(0.0, synthetic_corpus),
    "data.synthetic.general_rate": Check(0.5, synthetic_corpus),
}
