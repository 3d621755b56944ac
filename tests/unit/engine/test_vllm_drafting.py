"""The table of draft lengths inside vLLM's scheduler, and drafts counted by position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.engine.vllm_groups import Drafting
from slipstream.records.steps import ScheduleEntry


def engine(k: int, lookup: list[int] | None) -> Any:
    """vLLM's `LLM` as far as it is used; up to 4 rollouts at once."""
    scheduler = SimpleNamespace(dynamic_sd_lookup=lookup, scheduler_config=SimpleNamespace(max_num_seqs=4))
    metrics = [
        SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=value, values=[2, 1])
        for name, value in (("drafts", 3), ("draft_tokens", 5), ("accepted_tokens", 3), ("accepted_tokens_per_pos", 0))
    ]
    return SimpleNamespace(
        get_metrics=lambda: metrics,
        llm_engine=SimpleNamespace(
            vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=k)),
            logger_manager=SimpleNamespace(stat_loggers=[]),
            engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)),
        ),
    )


def lookup(llm: Any) -> list[int]:
    return llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup


def entry(start: int, end: int, k: int) -> ScheduleEntry:
    return ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k)


def test_a_table_is_spread_over_all_running_batches_and_carried_on_beyond_its_end() -> None:
    llm = engine(5, [0, 5, 5, 5, 5])
    Drafting(llm).draft_by([entry(1, 2, 5), entry(3, 3, 1)])
    assert lookup(llm) == [0, 5, 5, 1, 1]  # the first is for no rollout at all
    Drafting(llm).draft_by([entry(1, 1, 0)])
    assert lookup(llm) == [0, 0, 0, 0, 0]


def test_an_engine_that_started_without_a_table_cannot_change_its_length() -> None:
    with pytest.raises(ConfigError, match=r"draft.length can be changed only in an engine that started with a table"):
        Drafting(engine(5, None)).draft_by([entry(1, 1, 0)])


def test_a_table_with_longer_drafts_than_the_engine_has_room_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft.length must be at most 5, got 7"):
        Drafting(engine(5, [0, 5, 5, 5, 5])).draft_by([entry(1, 1, 7)])


def test_drafts_are_counted_by_position_over_the_steps() -> None:
    llm = engine(2, None)
    drafting = Drafting(llm)
    (logger,) = llm.llm_engine.logger_manager.stat_loggers
    for counts in ([1, 1], [2, 1]):
        logger.record(
            SimpleNamespace(spec_decoding_stats=SimpleNamespace(num_draft_tokens_per_pos=counts)), None, engine_idx=0
        )
    logger.record(SimpleNamespace(spec_decoding_stats=None), None, engine_idx=0)  # a step that verified nothing
    counters = drafting.counters()
    assert counters.drafted_by_position == (3, 2)
    assert counters.accepted_by_position == (2, 1)
