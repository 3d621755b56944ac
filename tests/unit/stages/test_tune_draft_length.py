"""The sweep as a stage: which engines it starts, and the first speedup of a run, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.drafts import length
from slipstream.recipe import load_recipe
from slipstream.records.stages import SweepPoint
from slipstream.stages import tune_draft_length
from slipstream.stages.recipe_engines import switch_length
from slipstream.stages.tune_draft_length import first_speedup


def point(k: int, generation_s: float, speedup: float) -> SweepPoint:
    return SweepPoint(
        k=k,
        batch=16,
        generation_s=generation_s,
        generation_p10_s=generation_s,
        generation_p90_s=generation_s,
        num_repeats=5,
        autoregressive_s=4.0,
        speedup=speedup,
        mean_acceptance_length=2.0,
        rate_by_position=(0.5,),
    )


def test_the_first_speedup_is_the_best_of_the_first_batch_and_names_what_it_is_of() -> None:
    assert first_speedup([point(1, 3.0, 1.3), point(3, 2.0, 1.9), point(5, 2.5, 1.6)]) == (
        "first measured speedup: k=3 generates 1.90x as fast as autoregressive at batch 16 "
        "(4.00 -> 2.00 s, median of 5)"
    )


def test_a_loss_is_told_as_it_is() -> None:
    assert "k=1 generates 0.80x as fast" in first_speedup([point(1, 5.0, 0.8)])


@pytest.mark.parametrize(("rule", "switch"), [("fixed", None), ("by_batch", switch_length)])
def test_drafting_that_is_switched_off_is_swept_where_the_length_may_follow_the_running_batch(
    monkeypatch: pytest.MonkeyPatch, rule: str, switch: object
) -> None:
    handed: list[dict[str, Any]] = []
    totals: list[int] = []

    def sweep(*_: Any, **how: Any) -> length.Sweep:
        handed.append(how)
        return length.Sweep(points=(), rounds=())

    @contextmanager
    def progress(node: str, *, total: int, unit: str) -> Iterator[Any]:
        totals.append(total)
        yield SimpleNamespace(advance=lambda: None)

    monkeypatch.setattr(tune_draft_length.length, "sweep", sweep)
    monkeypatch.setattr(tune_draft_length, "progress", progress)
    monkeypatch.setattr(tune_draft_length, "read_prompt_sets", lambda data: SimpleNamespace(train=()))
    recipe = load_recipe("tiny", overrides={"draft": {"length": rule}})
    here = Path()
    tune_draft_length._sweep(recipe, policy=here, data=here, draft=here, timed=set())
    assert [how["switch"] for how in handed] == [switch]
    assert [how["sampling"] for how in handed] == [recipe.sampling]
    for most, expected in ((100, 100), (500, recipe.sampling.max_response_tokens)):
        capped = replace(recipe, tuning=replace(recipe.tuning, max_response_tokens=most))
        tune_draft_length._sweep(capped, policy=here, data=here, draft=here, timed=set())
        assert handed[-1]["sampling"] == replace(recipe.sampling, max_response_tokens=expected)
    assert totals[:1] == [(len(recipe.tuning.candidate_ks) - 1) * len(recipe.tuning.batch_sizes)]
