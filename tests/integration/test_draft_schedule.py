"""The draft length by running batch in the real engine: obeyed, changed between generations, without a trace left."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.length import constant
from slipstream.drafts.methods import speculative_config
from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import ScheduleEntry
from slipstream.refit.config import WeightFiles
from slipstream.workers.engines import start_engine
from tests import small
from tests.small import DRAFT, ENGINE, PROMPTS, prompts, require_logprobs_of, tokens

pytestmark = pytest.mark.slow

SAMPLING = replace(small.SAMPLING, temperature=1.0)
GREEDY = replace(SAMPLING, temperature=0.0)
TABLE = (
    ScheduleEntry(batch_from=1, batch_to=2, num_speculative_tokens=4),
    ScheduleEntry(batch_from=3, batch_to=16, num_speculative_tokens=1),
)


def drafted(result: GenerationResult) -> tuple[int, ...]:
    assert result.acceptance is not None
    return result.acceptance.drafted_by_position


def start(models: dict[str, Path]) -> AbstractContextManager[Any]:
    """The engine that drafts by the table; it is kept idle, for the next one who starts such an engine."""
    config = replace(ENGINE, max_model_len=256, num_kept_idle=1)
    draft = speculative_config(DRAFT, models["old_draft"], 4, schedule=TABLE)
    return start_engine(models["old"], config=config, speculative_config=draft)


def test_the_length_follows_the_running_batch_and_another_can_be_set_for_a_while(
    models: dict[str, Path], ray_session: None
) -> None:
    with start(models) as engine:
        (process,) = [each.pid for each in engine.workers]
        many = engine.generate(PROMPTS, sampling=SAMPLING, group_size=4, seed=1)
        few = engine.generate(PROMPTS[:1], sampling=SAMPLING, group_size=2, seed=1)
        greedy = engine.generate(PROMPTS, sampling=GREEDY, group_size=1, seed=1)
        alone = engine.generate(PROMPTS[:2], sampling=SAMPLING, group_size=1, seed=3)
        engine.draft_by(constant(0))
        none = engine.generate(PROMPTS, sampling=GREEDY, group_size=1, seed=1)
        sampled = engine.generate(PROMPTS, sampling=SAMPLING, group_size=1, seed=1)
        engine.draft_by(TABLE)
        again = engine.generate(PROMPTS[:2], sampling=SAMPLING, group_size=1, seed=3)
        engine.draft_by(constant(0))
    with start(models) as engine:
        assert [each.pid for each in engine.workers] == [process]
        handed_on = engine.generate(PROMPTS[:2], sampling=SAMPLING, group_size=1, seed=3)

    first, second, *_ = drafted(many)
    assert first > 10 * second  # only what is drafted once two are left is longer than 1
    assert drafted(few)[3] > 0
    assert few.acceptance is not None and few.acceptance.num_draft_tokens == sum(drafted(few))
    assert [time.num_running for time in many.running][-1] == 16
    assert sum(time.num_tokens for time in many.running) == sum(map(len, tokens(many))) - 16  # but the prompts' step
    # Without drafts: no draft was verified, and nothing else is drawn.
    assert none.acceptance is not None and none.acceptance.num_drafts == 0
    assert tokens(none) == tokens(greedy)
    require_logprobs_of(models["old"], sampled, temperature=SAMPLING.temperature)
    # The draft's own cache has no hole: what comes after is as if nothing had been switched.
    assert tokens(handed_on) == tokens(again) == tokens(alone)
    assert handed_on.acceptance == again.acceptance == alone.acceptance


def test_prompts_that_were_cached_without_drafts_are_drafted_for_as_any_other(
    models: dict[str, Path], ray_session: None
) -> None:
    """Prompts of more than a block of the prefix cache: at length 0 the draft's cache is filled all the same."""
    long = prompts((2, *((7 * i + 3 * j) % 60 + 4 for j in range(200))) for i in range(2))
    with start(models) as engine:
        engine.draft_by(constant(0))
        engine.generate(long, sampling=SAMPLING, group_size=2, seed=1)
        engine.draft_by(constant(4))
        cached = engine.generate(long, sampling=SAMPLING, group_size=2, seed=2)
        engine.refit(WeightFiles(policy=models["old"], policy_version=0))  # forgets what is cached
        fresh = engine.generate(long, sampling=SAMPLING, group_size=2, seed=2)
        engine.close()
    assert cached.acceptance is not None and cached.acceptance.num_accepted_tokens > 0
    assert tokens(cached) == tokens(fresh)
    assert cached.acceptance == fresh.acceptance
