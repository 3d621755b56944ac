"""Where prompts come from, and how many and how long they may be."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from slipstream.config import Checked, PositiveInt, Seed, Text, rule
from slipstream.data.synthetic import SyntheticConfig

SYNTHETIC = "synthetic"
DATA_SUFFIXES = (".json", ".jsonl", ".parquet")
"""Endings of the local files that are read."""


class SourceConfig(Checked, path="data source"):
    """One data set: a hub id, a local .json, .jsonl or .parquet file, a directory of such files, or `synthetic`."""

    path: Text
    """Hub id, file or directory of the rows, or `synthetic` for worked sums made on the spot."""
    subset: Text | None = None
    """Configuration name on the hub, as `en` of open-r1/DAPO-Math-17k-Processed; null takes the only one."""
    split: Text | None = None
    """Split to read, as `train_sft` of HuggingFaceH4/ultrachat_200k; null takes `train`, or a whole file."""
    max_rows: PositiveInt | None = None
    """Rows to read, chosen by `data.seed`; null reads all."""

    def _check(self) -> None:
        for name in ("subset", "split"):
            is_given = getattr(self, name) is not None and self.path == SYNTHETIC
            self._require(not is_given, name, "must be null with path synthetic", "there is one set only")


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
    seed: Seed = 0
    """Seed of the order of rows and of the synthetic sets. Set it for another sample of the data."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    """Sizes and difficulty of the sets whose path is `synthetic`."""
