"""The sweep as a stage: which engines it starts, and the first speedup of a run, told in one line."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.drafts import length
from slipstream.drafts.methods import DraftSampling
from slipstream.recipe import Recipe, load_recipe
from slipstream.records.files import read_record
from slipstream.records.stages import SamplingPoint, SweepPoint, TuningRecord
from slipstream.stages import tune_draft_length as stage
from slipstream.stages.recipe_engines import switch_length
from tests.small import replace_in, run_context
from tests.unit.report import handmade

NO_SWEEP = length.Sweep(points=(), rounds=())


def point(k: int, generation_s: float, speedup: float) -> SweepPoint:
    made = handmade.point(k, speedup)
    return replace(made, generation_s=generation_s, num_repeats=5, autoregressive_s=4.0)


def test_the_first_speedup_is_the_best_of_the_first_batch_a_loss_too_and_names_what_it_is_of() -> None:
    assert stage.first_speedup([point(1, 3.0, 1.3), point(3, 2.0, 1.9), point(5, 2.5, 1.6)]) == (
        "first measured speedup: k=3 generates 1.90x as fast as autoregressive at batch 16 "
        "(4.00 -> 2.00 s, median of 5)"
    )
    assert "k=1 generates 0.80x as fast" in stage.first_speedup([point(1, 5.0, 0.8)])


@pytest.mark.parametrize(("rule", "switch"), [("fixed", None), ("by_batch", switch_length)])
def test_no_drafting_is_swept_where_the_length_follows_the_batch(
    monkeypatch: pytest.MonkeyPatch, rule: str, switch: object
) -> None:
    handed: list[dict[str, Any]] = []
    totals: list[int] = []

    def progress(node: str, *, total: int, unit: str) -> Any:
        totals.append(total)
        return nullcontext(SimpleNamespace(advance=lambda: None))

    def swept(recipe: Recipe) -> dict[str, Any]:
        stage._sweep(recipe, policy=Path(), data=Path(), draft=Path(), timed=set())
        return handed[-1]

    replace_in(monkeypatch, stage.length, sweep=lambda *_, **how: handed.append(how) or NO_SWEEP)
    replace_in(monkeypatch, stage, progress=progress, read_prompt_sets=lambda data: SimpleNamespace(train=()))
    recipe = load_recipe("tiny", overrides={"draft": {"length": rule}})
    assert (swept(recipe)["switch"], handed[0]["sampling"]) == (switch, recipe.sampling)
    for most, expected in ((100, 100), (500, recipe.sampling.max_response_tokens)):
        capped = replace(recipe, tuning=replace(recipe.tuning, max_response_tokens=most))
        assert swept(capped)["sampling"] == replace(recipe.sampling, max_response_tokens=expected)
    assert totals[0] == (len(recipe.tuning.candidate_ks) - 1) * len(recipe.tuning.batch_sizes)


@pytest.mark.parametrize(
    ("asked", "chosen_k", "swept", "compared", "chosen"),
    [
        ("probabilistic", 3, "probabilistic", [], "probabilistic"),
        ("greedy", 3, "greedy", [], "greedy"),
        ("auto", 3, "probabilistic", [("probabilistic", 3), ("greedy", 3)], "greedy"),
        ("auto", 0, "probabilistic", [], "probabilistic"),
    ],
)
def test_both_kinds_of_drafts_are_compared_at_the_chosen_k_where_the_recipe_leaves_the_choice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    chosen_k: int,
    swept: str,
    compared: list[tuple[str, int]],
    chosen: str,
) -> None:
    """Greedy drafts take 2 seconds, probabilistic ones 3."""
    started: list[tuple[str, int]] = []
    sweeps: list[str] = []
    tags: list[dict[str, str]] = []

    def swept_engine(recipe: Recipe, policy: Path, draft: Path, k: int) -> Any:
        started.append((recipe.draft.sampling.value, k))
        return nullcontext(SimpleNamespace(workers=()))

    def compare(start: Any, prompts: Any, *, batch: int, **_: Any) -> tuple[SamplingPoint, ...]:
        assert batch == recipe.grpo.prompts_per_step * recipe.grpo.group_size
        points = []
        for kind, seconds in ((DraftSampling.PROBABILISTIC, 3.0), (DraftSampling.GREEDY, 2.0)):
            with start(kind):
                times = dict.fromkeys(("generation_s", "generation_p10_s", "generation_p90_s"), seconds)
                counts = {"batch": batch, "num_repeats": 3, "mean_acceptance_length": 2.0}
                points.append(SamplingPoint(sampling=kind, gain=3.0 / seconds, **times, **counts))
        return tuple(points)

    record = TuningRecord(chosen_k=chosen_k, reason="told so", points=(point(3, 2.0, 2.0),), schedule=())
    tracker = SimpleNamespace(log_artifact=lambda path: None, log=lambda *_: None, set_tags=tags.append)
    replace_in(monkeypatch, stage, _sweep=lambda recipe, **_: sweeps.append(recipe.draft.sampling.value) or NO_SWEEP)
    replace_in(monkeypatch, stage, swept_engine=swept_engine, fitting_weights=lambda *_: None, connect=lambda: None)
    replace_in(monkeypatch, stage, machines=lambda workers: "", tracked=lambda *_: nullcontext(tracker))
    replace_in(monkeypatch, stage, read_prompt_sets=lambda data: SimpleNamespace(train=()))
    replace_in(monkeypatch, stage, settled=lambda context, recipe: recipe)
    replace_in(monkeypatch, stage.length, choose=lambda *_, **__: record, compare=compare)
    recipe = load_recipe("tiny", overrides={"draft": {"sampling": asked}})
    for _ in range(2):  # the second attempt finds what the first one chose, and measures nothing
        paths = dict.fromkeys(("policy", "data", "draft"), tmp_path)
        directory = stage.tune_draft_length(run_context(tmp_path), recipe, **paths)
        assert read_record(TuningRecord, directory / "tuning.json").sampling == chosen
    assert (sweeps, started) == ([swept], compared)
    assert tags == [{"k": str(chosen_k), "draft.sampling": chosen}]
