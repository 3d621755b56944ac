"""Where prompts come from, and how many and how long they may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from slipstream.config import Checked, PositiveInt, Rule, require
from slipstream.data.synthetic import SyntheticConfig

SYNTHETIC = "synthetic"
DATA_SUFFIXES = (".json", ".jsonl", ".parquet")
"""Endings of the local files that are read."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One data set: a hub id, a local .json, .jsonl or .parquet file, a directory of such files, or `synthetic`."""

    path: str
    subset: str | None = None  # the hub's configuration name, as `en` of open-r1/DAPO-Math-17k-Processed
    split: str | None = None  # `train_sft` for HuggingFaceH4/ultrachat_200k; None: train, or a file whatever its name
    max_rows: int | None = None  # read only so many rows, chosen by seed; None reads all

    def __post_init__(self) -> None:
        require(bool(self.path), "data source path", "must not be empty", self.path)
        require(
            self.max_rows is None or self.max_rows > 0,
            f"max_rows of data source {self.path}",
            "must be > 0 or null",
            self.max_rows,
        )
        for name in ("subset", "split"):
            value = getattr(self, name)
            require(value != "", f"{name} of data source {self.path}", "must not be empty", value)
            is_given = value is not None and self.path == SYNTHETIC
            require(not is_given, f"{name} of data source {self.path}", "must not be set: there is one", value)


_ONE_PROBLEM = Rule("must hold {problem} exactly once", lambda text: text.count("{problem}") == 1)
_SOME = Rule("must name at least one source", bool)
_SYNTHETIC_SOURCE = (SourceConfig(path=SYNTHETIC),)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked, path="data"):
    """The four sets of a run. Training rows also found in a draft or the validation set are dropped and counted."""

    train: Annotated[tuple[SourceConfig, ...], _SOME] = _SYNTHETIC_SOURCE
    draft_in_domain: Annotated[tuple[SourceConfig, ...], _SOME] = _SYNTHETIC_SOURCE
    draft_general: Annotated[tuple[SourceConfig, ...], _SOME] = _SYNTHETIC_SOURCE
    validation: Annotated[tuple[SourceConfig, ...], _SOME] = _SYNTHETIC_SOURCE
    num_validation_problems: PositiveInt | None = None  # refuse any other number of unique problems; None takes any
    max_prompt_tokens: PositiveInt  # longer prompts are dropped and counted
    # What the user turn says; `{problem}` stands for the problem.
    instruction: Annotated[str, _ONE_PROBLEM] = "{problem}"
    seed: int = 0
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
