"""What `tune_draft_length` hands on, with a table that a test gives."""

from __future__ import annotations

from pathlib import Path

from slipstream.records.files import write_record
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ScheduleEntry


def tuned(directory: Path, *entries: tuple[int, int, int]) -> Path:
    """Write a tuning record with k = 3 and a table of (first batch, last batch, k); its directory."""
    table = tuple(ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k) for start, end, k in entries)
    write_record(TuningRecord(chosen_k=3, reason="told so", points=(), schedule=table), directory / "tuning.json")
    return directory
