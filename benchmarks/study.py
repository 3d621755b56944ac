"""Settings, results and table of the learning benchmark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config import from_mapping, merge, parse_overrides, require, to_mapping
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import append_line
from slipstream.types import Workload

GAIN = 0.10
"""Gain of the mean reward in both arms that counts as learning; the table prints it, and no status depends on it."""

_SEEDS = ("grpo.seed", "data.seed", "draft.seed", "policy.scratch.seed")
_COLUMNS = (
    "seed",
    "start reward",
    "gain, autoregressive",
    "gain, speculative",
    "acceptance length",
    "generation speedup",
    "step speedup",
    "start accuracy",
)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Settings that all seeds share; `overrides` are `section.field=value` with a YAML value."""

    recipe: str
    workload: Workload
    k: int  # draft tokens of the speculative arm; no sweep is run
    evaluate: bool  # measure the accuracy of the policy before GRPO, too
    pinned: bool  # pin each seed to one core, with one thread
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.k >= 1, "--k", "must be >= 1", self.k)
        longest = max(load_recipe(self.recipe, workload=self.workload, overrides=self._common()).tuning.candidate_ks)
        require(self.k <= longest, "--k", f"must be at most {longest}, the recipe's longest draft", self.k)

    def overrides_of(self, seed: int) -> dict[str, Any]:
        """Return the recipe's overrides for `seed`, which sets every random seed."""
        common = self._common()
        base = load_recipe(self.recipe, workload=self.workload, overrides=common)
        fields = [field for field in _SEEDS if base.policy.scratch is not None or not field.startswith("policy.")]
        for field in fields:
            common = merge(common, _nested(field, seed))
        return common

    def recipe_of(self, seed: int) -> Recipe:
        """Return the checked recipe of `seed`."""
        return load_recipe(self.recipe, workload=self.workload, overrides=self.overrides_of(seed))

    def key(self, seed: int) -> str:
        """Return a key of all settings that a result of `seed` depends on, except code and machine."""
        recipe = self.recipe_of(seed)
        return f"{recipe.fingerprint()}-{recipe.grpo.num_steps}steps-k{self.k}{'-pinned' if self.pinned else ''}"

    def _common(self) -> dict[str, Any]:
        common = {"learner": {"num_threads": 1}, "engine": {"num_threads": 1}} if self.pinned else {}
        for override in self.overrides:
            field, sign, _ = override.partition("=")
            require(bool(field and sign), "--override", "must read section.field=value", override)
            require(field not in _SEEDS, "--override", "must leave the seeds alone", override, "use --seeds")
        return merge(common, parse_overrides(self.overrides))


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedResult:
    """Result of one seed; a gain is the mean reward of the last quarter of the steps minus that of the first."""

    seed: int
    key: str
    recipe: str
    workload: str
    k: int
    num_steps: int
    pinned: bool
    dtype: str
    commit: str
    execution: str  # directory of the run
    start_reward: float  # mean reward of both arms' first steps, before any update
    gain_autoregressive: float
    gain_speculative: float
    mean_acceptance_length: float  # bonus token included
    generation_speedup: float
    step_speedup: float
    start_accuracy: float | None  # avg@k before GRPO
    rewards_autoregressive: tuple[float, ...]  # by step
    rewards_speculative: tuple[float, ...]
    elapsed_s: float  # seconds of the whole seed


def append(result: SeedResult, path: Path) -> None:
    """Append one line, in a single write where possible, so that concurrent seeds do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        append_line(file, json.dumps(to_mapping(result), allow_nan=False).encode())
        os.fsync(file.fileno())


def finished(path: Path, study: Study, seeds: Sequence[int]) -> dict[int, SeedResult]:
    """Read the results of `seeds` with this study's settings, by seed; the last result of a seed counts.

    Raises:
        ConfigError: the fields of a line are not those of a result.
    """
    if not path.is_file():
        return {}
    results = [from_mapping(SeedResult, values, path.name) for values in _whole_lines(path)]
    keys = {seed: study.key(seed) for seed in seeds}
    return {
        result.seed: result
        for result in results
        if keys.get(result.seed) == result.key and (result.start_accuracy is not None or not study.evaluate)
    }


def _whole_lines(path: Path) -> Iterator[Any]:
    """Parse the lines; a line that a crash truncated is no JSON, and its seed runs again."""
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def table(results: Mapping[int, SeedResult]) -> str:
    """Format a Markdown table of the seeds with medians, and the number of seeds that learned in both arms."""
    if not results:
        return "no seed has finished"
    ordered = [results[seed] for seed in sorted(results)]
    rows = [_figures(result) for result in ordered]
    lines = [_line(_COLUMNS), "|---:" * len(_COLUMNS) + "|"]
    lines += [_line((str(result.seed), *_shown(row))) for result, row in zip(ordered, rows, strict=True)]
    lines.append(_line(("median", *_shown([_median(column) for column in zip(*rows, strict=True)]))))
    learned = sum(min(result.gain_autoregressive, result.gain_speculative) >= GAIN for result in ordered)
    return "\n".join([*lines, "", f"{learned} of {len(ordered)} seeds gain >= {GAIN:.2f} in both arms"])


def _figures(result: SeedResult) -> list[float | None]:
    return [
        result.start_reward,
        result.gain_autoregressive,
        result.gain_speculative,
        result.mean_acceptance_length,
        result.generation_speedup,
        result.step_speedup,
        result.start_accuracy,
    ]


def _shown(figures: Sequence[float | None]) -> list[str]:
    formats = ("{:.3f}", "{:+.3f}", "{:+.3f}", "{:.2f}", "{:.2f}x", "{:.2f}x", "{:.3f}")
    return ["" if figure is None else form.format(figure) for figure, form in zip(figures, formats, strict=True)]


def _median(column: Sequence[float | None]) -> float | None:
    known = [figure for figure in column if figure is not None]
    return float(np.median(known)) if known else None


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _nested(field: str, value: Any) -> dict[str, Any]:
    """`a.b`, 1 -> {a: {b: 1}}."""
    for name in reversed(field.split(".")):
        value = {name: value}
    return value
