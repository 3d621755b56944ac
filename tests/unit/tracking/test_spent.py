"""What an execution cost, worked by hand from spools with made-up times."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.tracking import GPUS_TAG, spent, spool_directory
from slipstream.tracking.spool import Event, RunHeader, Spool

HOUR_MS = 3_600_000


def spool(root: Path, key: str, *events: tuple[float, str], num_gpus: int = 0) -> None:
    """Events of (hour, kind)."""
    header = RunHeader(experiment="tiny", key=key, name=key, tags={GPUS_TAG: str(num_gpus)})
    file = Spool(spool_directory(root) / f"{key.replace('/', '-')}.jsonl")
    for hour, kind in events:
        opened = header if kind == "open" else None
        file.append(Event(kind=kind, time_ms=int(hour * HOUR_MS), header=opened))  # type: ignore[arg-type]
    file.close()


def test_arms_side_by_side_count_once_in_hours_and_each_in_gpu_hours(tmp_path: Path) -> None:
    spool(tmp_path, "run/data", (0.0, "open"), (0.5, "end"))
    spool(tmp_path, "run/base", (1.0, "open"), (3.0, "end"), num_gpus=4)
    spool(tmp_path, "run/spec", (1.0, "open"), (2.0, "end"), num_gpus=4)
    cost = spent(tmp_path, "run", now_ms=9 * HOUR_MS)
    assert cost.hours == pytest.approx(0.5 + 2.0)
    assert cost.gpu_hours == pytest.approx(4 * 2.0 + 4 * 1.0)


def test_a_killed_attempt_counts_to_its_last_point_and_the_pause_before_the_next_not_at_all(tmp_path: Path) -> None:
    spool(tmp_path, "run/arm", (0.0, "open"), (1.0, "metrics"), (10.0, "open"), (12.0, "end"), num_gpus=2)
    cost = spent(tmp_path, "run", now_ms=20 * HOUR_MS)
    assert cost.hours == pytest.approx(1.0 + 2.0)
    assert cost.gpu_hours == pytest.approx(6.0)


def test_what_goes_on_counts_until_now(tmp_path: Path) -> None:
    spool(tmp_path, "run/report", (2.0, "open"))
    assert spent(tmp_path, "run", now_ms=3 * HOUR_MS).hours == pytest.approx(1.0)


def test_the_executions_own_run_and_other_executions_are_left_out(tmp_path: Path) -> None:
    spool(tmp_path, "run", (0.0, "open"), (9.0, "end"))
    spool(tmp_path, "run-2/arm", (0.0, "open"), (9.0, "end"), num_gpus=8)
    cost = spent(tmp_path, "run", now_ms=9 * HOUR_MS)
    assert (cost.hours, cost.gpu_hours) == (0.0, 0.0)
