"""Where prompts come from, and how many and how long they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from slipstream.config import SWITCH, Checked, PositiveFloat, PositiveInt, Seed, Text, require, rule
from slipstream.data.synthetic import SyntheticConfig

SYNTHETIC = "synthetic"
REASONING_GYM = "reasoning_gym:"
"""Start of the path of a source whose rows the package reasoning-gym makes; the rest names the task."""
DATA_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Kinds of the local files that are read, as `datasets` names them, by ending."""

_PLAIN = rule("must be text, a number, true, false or null", lambda value: not isinstance(value, list | dict))


class ColumnsConfig(Checked, path="columns"):
    """Names of the columns of a source that follows no known schema."""

    problem: Text
    """Column of the problem: text, or a chat as a list of turns. Set it to the column's name."""
    answer: Text | None = None
    """Column of the reference answer; null: there is none. Set it for rows that are trained on or validated."""
    extra: tuple[Text, ...] = ()
    """Columns that a reward function gets in `extra_info`. Set it where your reward reads them."""


class SourceConfig(Checked, path="data source"):
    """One data set: a hub id, a local file or directory of files, a task of reasoning-gym, or `synthetic`."""

    path: Text
    """Hub id, .json, .jsonl, .parquet or .csv file, directory of such files, `reasoning_gym:TASK`, or `synthetic` for
    worked sums made on the spot."""
    subset: Text | None = None
    """Configuration name on the hub, as `en` of open-r1/DAPO-Math-17k-Processed; null takes the only one."""
    split: Text | None = None
    """Split to read, as `train_sft` of HuggingFaceH4/ultrachat_200k; null takes `train`, or a whole file."""
    max_rows: PositiveInt | None = None
    """Rows to read, chosen by `data.seed`; null reads all."""
    columns: ColumnsConfig | None = None
    """Names of the columns; null: a known schema has them."""
    answer_after: Text | None = None
    """Mark after whose last occurrence the answer stands; a row without it has none. Set it for worked answers."""
    where: dict[str, Annotated[Any, _PLAIN]] = field(default_factory=dict)
    """Values by column of the rows to read; those of a .csv file are text. Set it to read a part."""
    weight: PositiveFloat | None = None
    """Share of the set's prompts, relative to the other sources'; the source that is scarcest for its weight is taken
    whole. Set it for all sources to mix them."""
    data_source: Text | None = None
    """Name by which rewards tell sets apart; null: the row's `data_source`. Set it for `reward.functions`."""
    config: dict[str, Annotated[Any, SWITCH]] = field(default_factory=dict)
    """Settings of a reasoning-gym task; without `seed`, `data.seed` and the set's name give one. Set it as the task's
    difficulty asks."""

    @property
    def task(self) -> str | None:
        """Name of the reasoning-gym task; None for another source."""
        return self.path.removeprefix(REASONING_GYM) if self.path.startswith(REASONING_GYM) else None

    def sampled(self, numbers: Sequence[int], seed: int) -> Sequence[int]:
        """Choose `max_rows` of the rows with these numbers; all of them where there are no more."""
        if self.max_rows is None or self.max_rows >= len(numbers):
            return numbers
        order = np.random.default_rng(seed).permutation(len(numbers))[: self.max_rows]
        return [numbers[index] for index in order]

    def _check(self) -> None:
        is_made = self.task is not None or self.path == SYNTHETIC
        for name in ("subset", "split", "columns", "answer_after", "where", "data_source"):
            rule, fix = f"must be left out with path {self.path}", "its rows are made on the spot"
            self._require(not (getattr(self, name) and is_made), name, rule, fix)
        is_used = self.task is not None or not self.config
        self._require(is_used, "config", f"must be left out without {REASONING_GYM}TASK as path")


class ExampleConfig(Checked, path="data example"):
    """One worked example, shown to the policy as two turns before the problem."""

    problem: Text
    """Problem, which is put into `data.instruction` like every other. Set it to one that the sets do not hold."""
    response: Text
    """Response to it. Set it in the form that the reward reads."""


_SYNTHETIC_SOURCE = (SourceConfig(path=SYNTHETIC),)
_SOME = Field(min_length=1)


class DataConfig(Checked, path="data"):
    """The four sets of a run. Training rows also found in a draft or the validation set are dropped and counted."""

    train: Annotated[tuple[SourceConfig, ...], _SOME] = _SYNTHETIC_SOURCE
    """Problems with answers that the policy is trained on."""
    draft_in_domain: Annotated[tuple[SourceConfig, ...], _SOME] = _SYNTHETIC_SOURCE
    """Prompts of the training's domain, for drafts with `draft.init: in_domain` or `from_hub`."""
    draft_general: Annotated[tuple[SourceConfig, ...], _SOME] = _SYNTHETIC_SOURCE
    """Prompts of any domain, for drafts with `draft.init: general`."""
    validation: Annotated[tuple[SourceConfig, ...], _SOME] = _SYNTHETIC_SOURCE
    """Problems with answers that accuracy is measured on."""
    num_validation_problems: PositiveInt | None = None
    """Number of unique validation problems that the run insists on; null takes any number."""
    max_prompt_tokens: PositiveInt
    """Tokens of the longest prompt; longer ones are dropped and counted."""
    instruction: Annotated[
        str,
        rule(
            "must hold {problem} exactly once",
            lambda text: text.count("{problem}") == 1,
            pattern=r"^((?!\{problem\})[\s\S])*\{problem\}((?!\{problem\})[\s\S])*$",
        ),
    ] = "{problem}"
    """Text of the user turn, in which `{problem}` stands for the problem."""
    system: Text | None = None
    """System turn of the rows that bring none of their own. Set it for a policy that expects one."""
    examples: tuple[ExampleConfig, ...] = ()
    """Worked examples before each problem. Set them for a policy that cannot follow the task without."""
    chat_template_args: dict[str, Annotated[Any, _PLAIN, SWITCH]] = field(default_factory=dict)
    """Arguments of the policy's chat template. Set them for one that takes any, as `enable_thinking` of Qwen3's."""
    seed: Seed = 0
    """Seed of the order of rows and of the synthetic sets. Set it for another sample of the data."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    """Sizes and difficulty of the sets whose path is `synthetic`."""

    def _check(self) -> None:
        for name in ("train", "draft_in_domain", "draft_general", "validation"):
            weights = [source.weight for source in getattr(self, name)]
            rule = "must have a weight in all of its sources or in none"
            require(len({weight is None for weight in weights}) == 1, f"data.{name}", rule, weights)
