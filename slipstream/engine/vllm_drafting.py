"""How a vLLM engine drafts: its table of lengths by running batch, and its acceptance counters.

vLLM looks the length up at every step, by the number of rollouts in it, for the draft that the next step verifies
(`Scheduler.dynamic_sd_lookup`). At length 0 the draft's first pass still runs, which keeps its KV cache whole: its cost
remains, and a later longer draft starts from what it would have started from anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.config import require
from slipstream.engine.acceptance import AcceptanceCounters, read_counters
from slipstream.records.steps import ScheduleEntry


class Drafting:
    """The drafts of an engine whose core runs in this process.

    It is one of vLLM's stat loggers, for vLLM counts how many drafts had a token at each position but exports no such
    metric. Drafts differ in length under a table.

    Args:
        llm: vLLM's `LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._drafted: list[int] = [0] * llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens
        llm.llm_engine.logger_manager.stat_loggers.append(self)

    def counters(self) -> AcceptanceCounters:
        """Since the engine's start."""
        return read_counters(self._llm.get_metrics(), drafted_by_position=self._drafted)

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """Replace the table; nothing may be under way.

        Raises:
            ConfigError: vLLM was started without a table, and may have captured graphs for one length alone; or the new
                one asks for longer drafts than it has room for.
        """
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        require(
            scheduler.dynamic_sd_lookup is not None,
            "draft.length",
            "can be changed only in an engine that started with a table",
            None,
            "start it with a schedule",
        )
        longest = max(entry.num_speculative_tokens for entry in schedule)
        require(longest <= len(self._drafted), "draft.length", f"must be at most {len(self._drafted)}", longest)
        scheduler.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(
            [(entry.batch_from, entry.batch_to, entry.num_speculative_tokens) for entry in schedule],
            vllm_max_batch_size=scheduler.scheduler_config.max_num_seqs,
            vllm_num_speculative_tokens=len(self._drafted),
        )

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """See vLLM's `AggregateStatLoggerBase`: one step's statistics."""
        del iteration_stats
        stats = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._drafted = [a + b for a, b in zip(self._drafted, stats.num_draft_tokens_per_pos, strict=True)]

    def log(self) -> None:
        """See vLLM's `AggregateStatLoggerBase`: nothing is printed."""

    def log_engine_initialized(self) -> None:
        """See vLLM's `AggregateStatLoggerBase`."""

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        """See vLLM's `AggregateStatLoggerBase`."""
