"""Which engine a stage gets of a recipe, and by which length it drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.length import DraftLength, constant
from slipstream.recipe import load_recipe
from slipstream.records.steps import ScheduleEntry
from slipstream.stages import recipe_engines
from slipstream.stages.recipe_engines import draft_length, swept_engine, switch_length
from slipstream.workers.engines import RemoteEngine
from tests.unit.stages.tuned import tuned


@pytest.mark.parametrize(("rule", "tables"), [("fixed", [(), ()]), ("by_batch", [(), constant(3)])])
def test_engines_of_the_sweep_can_change_their_length_where_it_may_follow_the_running_batch(
    monkeypatch: pytest.MonkeyPatch, rule: str, tables: list[Sequence[ScheduleEntry]]
) -> None:
    started: list[tuple[int, Sequence[ScheduleEntry]]] = []

    @contextmanager
    def recipe_engine(*args: Any, schedule: Sequence[ScheduleEntry]) -> Iterator[None]:
        started.append((args[-1], schedule))
        yield

    monkeypatch.setattr(recipe_engines, "recipe_engine", recipe_engine)
    recipe = load_recipe("tiny", overrides={"draft": {"length": rule}})
    for k in (0, 3):
        with swept_engine(recipe, Path("policy"), Path("draft"), k):
            pass
    assert started == list(zip((0, 3), tables, strict=True))


def test_a_length_is_switched_by_a_table_of_that_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Sequence[ScheduleEntry]] = []
    monkeypatch.setattr(RemoteEngine, "draft_by", lambda self, schedule: told.append(schedule))
    engine = RemoteEngine.__new__(RemoteEngine)
    switch_length(engine, 0)
    switch_length(engine, 3)
    assert told == [constant(0), constant(3)]


def test_the_arm_drafts_by_the_tuned_table_only_where_the_recipe_asks_for_it(tmp_path: Path) -> None:
    tuning = tuned(tmp_path, (1, 8, 5), (9, 48, 2))
    assert draft_length(load_recipe("tiny"), tuning) == DraftLength(num_speculative_tokens=3)
    by_batch = load_recipe("tiny", overrides={"draft": {"length": "by_batch"}})
    assert draft_length(by_batch, tuning).num_speculative_tokens == 5
    assert [entry.num_speculative_tokens for entry in draft_length(by_batch, tuning).schedule] == [5, 2]


def test_an_engine_under_the_autopilot_starts_with_a_table_so_that_its_length_can_change(tmp_path: Path) -> None:
    piloted = load_recipe("tiny", overrides={"draft": {"autopilot": True}})
    length = draft_length(piloted, tuned(tmp_path, (1, 48, 3)))
    assert [entry.num_speculative_tokens for entry in length.schedule] == [3]
    assert length.label == "3"
