"""Which engine a stage gets of a recipe, and by which length it drafts."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafts.length import DraftLength, constant
from slipstream.recipe import load_recipe
from slipstream.records.steps import ScheduleEntry
from slipstream.stages import recipe_engines
from slipstream.stages.recipe_engines import draft_length, swept_engine, switch_length
from slipstream.workers.engines import RemoteEngine
from tests.small import tuned


@pytest.mark.parametrize(("rule", "tables"), [("fixed", [(), ()]), ("by_batch", [(), constant(3)])])
def test_engines_of_the_sweep_can_change_their_length_where_it_may_follow_the_running_batch(
    monkeypatch: pytest.MonkeyPatch, rule: str, tables: list[Sequence[ScheduleEntry]]
) -> None:
    def recipe_engine(*args: Any, schedule: Sequence[ScheduleEntry]) -> Any:
        return nullcontext((args[-1], schedule))

    monkeypatch.setattr(recipe_engines, "recipe_engine", recipe_engine)
    recipe = load_recipe("tiny", overrides={"draft": {"length": rule}})
    for k, table in zip((0, 3), tables, strict=True):
        with swept_engine(recipe, Path("policy"), Path("draft"), k) as started:
            assert started == (k, table)


def test_a_length_is_switched_by_a_table_of_that_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Sequence[ScheduleEntry]] = []
    monkeypatch.setattr(RemoteEngine, "draft_by", lambda self, schedule: told.append(schedule))
    for k in (0, 3):
        switch_length(RemoteEngine.__new__(RemoteEngine), k)
    assert told == [constant(0), constant(3)]


def test_the_arm_drafts_by_a_table_only_where_its_length_can_change(tmp_path: Path) -> None:
    """The tuned table where the recipe asks for it, and under the autopilot one of a constant length."""
    tuning = tuned(tmp_path, (1, 8, 5), (9, 48, 2))
    assert draft_length(load_recipe("tiny"), tuning) == DraftLength(num_speculative_tokens=3)
    by_batch = draft_length(load_recipe("tiny", overrides={"draft": {"length": "by_batch"}}), tuning)
    assert by_batch.num_speculative_tokens == 5
    assert [entry.num_speculative_tokens for entry in by_batch.schedule] == [5, 2]
    piloted = draft_length(load_recipe("tiny", overrides={"draft": {"autopilot": True}}), tuning)
    assert ([entry.num_speculative_tokens for entry in piloted.schedule], piloted.label) == ([3], "3")
