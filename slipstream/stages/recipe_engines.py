"""The engine of a recipe, and what the speculative arm drafts with and by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from slipstream.drafts.config import DraftConfig, DraftLengthRule
from slipstream.drafts.length import DraftLength, constant, length_of
from slipstream.drafts.methods import TRAITS, speculative_config
from slipstream.engine.protocol import Engines
from slipstream.grpo.loop_config import KvCache
from slipstream.recipe import Recipe
from slipstream.records.files import read_record
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ScheduleEntry
from slipstream.workers.engines import RemoteEngine, start_engine


@contextmanager
def recipe_engine(
    recipe: Recipe,
    policy: Path,
    draft: Path,
    k: int,
    *,
    schedule: Sequence[ScheduleEntry] = (),
    kv_cache: KvCache | None = None,
) -> Iterator[RemoteEngine]:
    """An engine with k draft tokens, the most of a schedule; all but speculation is the same for every k.

    Args:
        kv_cache: it runs in flight, and that becomes of keys and values when new weights enter.
    """
    weights = draft_weights(recipe.draft, draft)
    speculative = speculative_config(recipe.draft, weights, k, schedule=schedule) if k else None
    with start_engine(
        policy, config=recipe.engine, speculative_config=speculative, layout=recipe.layout, kv_cache=kv_cache
    ) as engine:
        yield engine


def swept_engine(recipe: Recipe, policy: Path, draft: Path, k: int) -> AbstractContextManager[RemoteEngine]:
    """An engine of the sweep: its length can be switched where the recipe's follows the running batch."""
    return recipe_engine(recipe, policy, draft, k, schedule=constant(k) if k and drafts_by_batch(recipe) else ())


def switch_length(engine: Engines, k: int) -> None:
    """Have an engine that started with a table draft k tokens, at every running batch."""
    assert isinstance(engine, RemoteEngine)
    engine.draft_by(constant(k))


def drafts_by_batch(recipe: Recipe) -> bool:
    """The draft length follows the running batch, where that pays."""
    return recipe.draft.length is DraftLengthRule.BY_BATCH


def draft_length(recipe: Recipe, tuning: Path) -> DraftLength:
    """What the speculative arm drafts by: the tuned length, as the recipe's rule has it.

    An engine that the autopilot may stop from drafting is told from the start that its length changes.
    """
    record = read_record(TuningRecord, tuning / "tuning.json")
    length = length_of(record, by_batch=drafts_by_batch(recipe))
    if recipe.draft.autopilot.enabled and length.num_speculative_tokens and not length.schedule:
        return replace(length, schedule=constant(length.num_speculative_tokens))
    return length


def draft_weights(config: DraftConfig, draft: Path) -> Path | None:
    """The draft itself, in a directory that `pretrain_draft` wrote or that somebody brought; None of no own weights."""
    if not TRAITS[config.method].has_weights:
        return None
    inner = draft / "draft"
    return inner if inner.is_dir() else draft
