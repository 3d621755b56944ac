"""Where prompts come from, and how many and how long they may be."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.config import require
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


_SYNTHETIC_SOURCE = (SourceConfig(path=SYNTHETIC),)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The four sets of a run. Training rows also found in a draft or the validation set are dropped and counted."""

    train: tuple[SourceConfig, ...] = _SYNTHETIC_SOURCE
    draft_in_domain: tuple[SourceConfig, ...] = _SYNTHETIC_SOURCE
    draft_general: tuple[SourceConfig, ...] = _SYNTHETIC_SOURCE
    validation: tuple[SourceConfig, ...] = _SYNTHETIC_SOURCE
    num_validation_problems: int | None = None  # refuse any other number of unique problems; None takes any
    max_prompt_tokens: int  # longer prompts are dropped and counted
    instruction: str = "{problem}"  # what the user turn says; `{problem}` stands for the problem
    seed: int = 0
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    def __post_init__(self) -> None:
        for name in ("train", "draft_in_domain", "draft_general", "validation"):
            require(len(getattr(self, name)) > 0, f"data.{name}", "must name at least one source", ())
        require(self.max_prompt_tokens > 0, "data.max_prompt_tokens", "must be > 0", self.max_prompt_tokens)
        require(
            self.num_validation_problems is None or self.num_validation_problems > 0,
            "data.num_validation_problems",
            "must be > 0 or null",
            self.num_validation_problems,
        )
        require(
            self.instruction.count("{problem}") == 1,
            "data.instruction",
            "must hold {problem} exactly once",
            self.instruction,
        )
