"""Engine of a recipe, with the draft and the draft length of its speculative arm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Semaphore

from slipstream.drafts.config import DraftConfig, DraftLengthRule
from slipstream.drafts.length import DraftLength, constant, length_of
from slipstream.drafts.methods import TRAITS, DraftSampling, require_choice, speculative_config
from slipstream.engine.protocol import Engines
from slipstream.grpo.config import KvCache
from slipstream.recipe import Recipe
from slipstream.records.files import read_record
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ScheduleEntry
from slipstream.workers.engines import RemoteEngine, start_engine


def recipe_engine(
    recipe: Recipe,
    policy: Path,
    draft: Path | None,
    k: int,
    *,
    schedule: Sequence[ScheduleEntry] = (),
    kv_cache: KvCache | None = None,
) -> AbstractContextManager[RemoteEngine]:
    """Engine with `k` draft tokens, the largest of a schedule; nothing but speculation depends on `k`.

    Args:
        draft: output of `pretrain_draft`, or its weights; None where nothing is drafted, or drafts are looked up.
        kv_cache: treatment of keys and values when new weights enter in flight; None: the engine takes none in flight.
    """
    speculative = None
    if k:
        weights = None if draft is None else draft_weights(recipe.draft, draft)
        speculative = speculative_config(recipe.draft, weights, k, schedule=schedule)
    return start_engine(
        policy,
        config=recipe.engine,
        speculative_config=speculative,
        layout=recipe.layout,
        kv_cache=kv_cache,
        returns_routes=recipe.grpo.router_replay,
    )


def swept_engine(recipe: Recipe, policy: Path, draft: Path, k: int) -> AbstractContextManager[RemoteEngine]:
    """Engine of the tuning sweep; its draft length can be switched if the recipe's follows the running batch."""
    swept = replace(recipe, engine=recipe.swept_engine, tuning=replace(recipe.tuning, gpu_memory_utilization=None))
    return recipe_engine(swept, policy, draft, k, schedule=constant(k) if k and drafts_by_batch(recipe) else ())


def sampled(recipe: Recipe, sampling: DraftSampling) -> Recipe:
    """Return the recipe with drafts of this kind."""
    return replace(recipe, draft=replace(recipe.draft, sampling=sampling))


@contextmanager
def started(engine: AbstractContextManager[RemoteEngine], starting: Semaphore) -> Iterator[RemoteEngine]:
    """Open an engine; `starting` bounds how many start at once."""
    with ExitStack() as opened:
        with starting:
            found = opened.enter_context(engine)
        yield found


def switch_length(engine: Engines, k: int) -> None:
    """Switch an engine that started with a schedule to `k` draft tokens at every running batch."""
    assert isinstance(engine, RemoteEngine)
    engine.draft_by(constant(k))


def drafts_by_batch(recipe: Recipe) -> bool:
    """Return True if the draft length follows the running batch, where that pays."""
    return recipe.draft.length is DraftLengthRule.BY_BATCH


def given_length(recipe: Recipe, k: int) -> DraftLength:
    """Return a draft length that nobody tuned; a recipe whose kind of drafts is to be tuned is refused."""
    require_choice(recipe.draft.sampling)
    return DraftLength(num_speculative_tokens=k, sampling=recipe.draft.sampling)


def draft_length(recipe: Recipe, tuning: Path) -> DraftLength:
    """Tuned draft length of the speculative arm, by the recipe's rule.

    An engine whose drafting the autopilot may switch off starts with a schedule, because its length changes.
    """
    record = read_record(TuningRecord, tuning / "tuning.json")
    length = length_of(record, by_batch=drafts_by_batch(recipe))
    if recipe.draft.autopilot and length.num_speculative_tokens and not length.schedule:
        return replace(length, schedule=constant(length.num_speculative_tokens))
    return length


def fitting_weights(recipe: Recipe, policy: Path, draft: Path) -> Path | None:
    """Return `draft_weights` of a draft, and refuse one that does not fit the policy."""
    from slipstream.drafts.compatibility import require_fit

    weights = draft_weights(recipe.draft, draft)
    require_fit(recipe.draft, policy, weights, max_model_len=recipe.engine.max_model_len)
    return weights


def draft_weights(config: DraftConfig, draft: Path) -> Path | None:
    """The draft itself, in a directory that `pretrain_draft` wrote or that somebody brought; None of no own weights."""
    if not TRAITS[config.method].has_weights:
        return None
    inner = draft / "draft"
    return inner if inner.is_dir() else draft
