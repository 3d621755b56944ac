"""Problems that reasoning-gym makes and scores: an optional package, which this module alone imports.

A task is a pure function of its settings, the seed among them, and of a row's index. So a prompt keeps these alone, and
whoever scores its responses makes the entry again, in the package's own types. Tasks whose entries take seconds to make
need a higher `reward.timeout_s`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from typing import Any

from slipstream.config import ConfigError, require
from slipstream.data.config import SourceConfig

EXTRA = "reasoning_gym"
"""Key of `extra_info` under which a prompt keeps its task, settings and index."""
_INSTALL = "install it: python -m pip install reasoning-gym"


def task_rows(source: SourceConfig, *, field: str, seed: int) -> list[dict[str, Any]]:
    """Make the rows of a source whose path names a task.

    Where the settings have no seed, one is made of `seed` and the set's name `field`, so that no two sets are alike.
    """
    task = source.task
    assert task is not None
    made_seed = int(hashlib.sha256(f"{seed}/{field}".encode()).hexdigest()[:8], 16)
    size = {} if source.max_rows is None else {"size": source.max_rows}
    settings = {"seed": made_seed, **size, **source.config}
    known = [each.name for each in fields(_settings_of(task, field))]
    for name in source.config:
        rule = f"must have settings of the task {task} alone, which are {', '.join(known)}"
        require(name in known, f"{field}.config", rule, name)
    try:
        dataset = _dataset(task, json.dumps(settings))
        entries = [dataset[index] for index in range(min(len(dataset), source.max_rows or len(dataset)))]
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{field}.config must be settings that {task} takes, got {source.config}; {error}") from error
    return [
        {
            "question": entry["question"],
            "answer": entry["answer"],
            "data_source": source.path,
            "extra_info": {EXTRA: {"task": task, "settings": settings, "index": index}, "metadata": entry["metadata"]},
        }
        for index, entry in enumerate(entries)
    ]


def task_score(answer: str | None, made_by: Mapping[str, Any]) -> float:
    """Score an answer, None where a response has none, by the task's own function; `made_by` stands under `EXTRA`."""
    dataset = _dataset(made_by["task"], json.dumps(made_by["settings"]))
    return float(dataset.score_answer(answer, _entry(dataset, made_by["index"])))


def _settings_of(task: str, field: str) -> type:
    """Return the class of the task's settings."""
    try:
        known: dict[str, Any] = import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        rule = "must have the package reasoning-gym installed for such a path"
        raise ConfigError(f"{field} {rule}, got reasoning_gym:{task} ({error}); {_INSTALL}") from error
    near = ", ".join(get_close_matches(task, known, n=3, cutoff=0.3) or sorted(known))
    rule = f"must name one of the {len(known)} tasks of reasoning-gym"
    require(task in known, field, rule, f"reasoning_gym:{task}", f"is it one of {near}?")
    return known[task][1]


@lru_cache(maxsize=64)
def _dataset(task: str, settings: str) -> Any:
    return import_module("reasoning_gym").create_dataset(task, **json.loads(settings))


@lru_cache(maxsize=64)
def _entry(dataset: Any, index: int) -> Any:
    return dataset[index]
