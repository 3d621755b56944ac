"""The store gives whole outputs of the same key, links to them, and never replaces what is in use."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.recipe import Recipe, load_recipe
from slipstream.stages.context import RunContext
from slipstream.stages.store import finished, kept, publish
from slipstream.tracking import TrackingConfig

UNTRACKED = TrackingConfig(uri="http://127.0.0.1:9", replay_every_s=0.1, close_wait_s=0.0)
STAGE = "pretrain_draft"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return replace(load_recipe("tiny"), tracking=UNTRACKED)


def context(root: Path, execution: str, *, reuse_stored: bool = True) -> RunContext:
    return RunContext(
        execution=execution, root=str(root), experiment="tiny", workload="rl_zero", reuse_stored=reuse_stored
    )


def make(run: RunContext, text: str, key: str = "k1") -> Path:
    """A stage that writes `text`."""
    (run.directory(STAGE) / "draft.json").write_text(text)
    return publish(run, STAGE, key)


def test_what_one_execution_made_the_next_one_takes_and_says_so(
    tmp_path: Path, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = context(tmp_path, "first"), context(tmp_path, "second")
    assert kept(first, recipe, STAGE, "k1") is None
    entry = make(first, "of first")
    assert entry == tmp_path / "store" / STAGE / "k1"
    assert kept(second, recipe, STAGE, "k1") == entry
    assert "pretrain_draft: reused" in caplog.text
    assert "by execution first from the same recipe sections" in caplog.text
    for run in (first, second):
        assert (run.directory(STAGE) / "draft.json").read_text() == "of first"
    spool = next((tmp_path / "spool").glob("*second-pretrain-draft*.jsonl")).read_text()
    assert '"reused_from":"first"' in spool


def test_another_key_is_another_output(tmp_path: Path, recipe: Recipe) -> None:
    make(context(tmp_path, "first"), "of first")
    assert kept(context(tmp_path, "second"), recipe, STAGE, "k2") is None


def test_a_fresh_execution_makes_its_own_and_leaves_the_store_alone(tmp_path: Path, recipe: Recipe) -> None:
    stored = make(context(tmp_path, "first"), "of first")
    fresh = context(tmp_path, "fresh", reuse_stored=False)
    assert kept(fresh, recipe, STAGE, "k1") is None
    own = make(fresh, "of fresh")
    assert own == tmp_path / "fresh" / STAGE
    assert (own / "draft.json").read_text() == "of fresh"
    assert (stored / "draft.json").read_text() == "of first"
    assert kept(fresh, recipe, STAGE, "k1") == own  # resumed: it goes on with its own


def test_of_two_that_make_the_same_thing_at_once_both_end_with_a_whole_one(tmp_path: Path) -> None:
    first, second = context(tmp_path, "first"), context(tmp_path, "second")
    (first.directory(STAGE) / "draft.json").write_text("of first")
    (second.directory(STAGE) / "draft.json").write_text("of second")
    assert publish(first, STAGE, "k1") == tmp_path / "store" / STAGE / "k1"
    assert publish(second, STAGE, "k1") == tmp_path / "second" / STAGE
    assert [(run.directory(STAGE) / "draft.json").read_text() for run in (first, second)] == ["of first", "of second"]


def test_half_an_output_is_never_used_and_makes_room_for_a_whole_one(tmp_path: Path, recipe: Recipe) -> None:
    half = tmp_path / "store" / STAGE / "k1"
    half.mkdir(parents=True)
    (half / "draft.json").write_text("ha")
    run = context(tmp_path, "first")
    assert kept(run, recipe, STAGE, "k1") is None
    assert (make(run, "whole") / "draft.json").read_text() == "whole"


def test_what_an_attempt_left_gives_way_to_a_stored_output(tmp_path: Path, recipe: Recipe) -> None:
    torn = context(tmp_path, "torn")
    (torn.directory(STAGE) / "checkpoint").mkdir()
    entry = make(context(tmp_path, "first"), "of first")
    assert kept(torn, recipe, STAGE, "k1") == entry
    assert [path.name for path in sorted(torn.directory(STAGE).iterdir())] == ["draft.json", "made.json"]


def test_a_removed_store_is_made_again(tmp_path: Path, recipe: Recipe) -> None:
    run = context(tmp_path, "first")
    make(run, "of first").rename(tmp_path / "elsewhere")
    assert kept(run, recipe, STAGE, "k1") is None
    assert (make(run, "again") / "draft.json").read_text() == "again"


def test_a_stage_is_finished_by_its_record_alone(tmp_path: Path) -> None:
    run = context(tmp_path, "first")
    directory = run.directory("tune_draft_length")
    (directory / "sweep.svg").write_text("")
    assert finished(run, "tune_draft_length", "tuning.json") is None
    (directory / "tuning.json").write_text("{}")
    assert finished(run, "tune_draft_length", "tuning.json") == directory
    assert finished(context(tmp_path, "second"), "tune_draft_length", "tuning.json") is None


def test_what_is_stored_survives_a_move_of_the_root(tmp_path: Path, recipe: Recipe) -> None:
    make(context(tmp_path / "old", "first"), "of first")
    (tmp_path / "old").rename(tmp_path / "new")
    moved = context(tmp_path / "new", "first")
    assert kept(moved, recipe, STAGE, "k1") == tmp_path / "new" / "store" / STAGE / "k1"
    assert (moved.directory(STAGE) / "draft.json").read_text() == "of first"


def test_an_output_with_a_link_that_leads_nowhere_is_made_again(
    tmp_path: Path, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    """As to a model in a cache that was moved."""
    model = tmp_path / "hub" / "model.safetensors"
    model.parent.mkdir()
    model.write_text("weights")
    run = context(tmp_path / "runs", "first")
    (run.directory(STAGE) / "model.safetensors").symlink_to(model)
    entry = make(run, "of first")
    assert kept(run, recipe, STAGE, "k1") == entry
    model.unlink()
    for again in (run, context(tmp_path / "runs", "second")):
        assert kept(again, recipe, STAGE, "k1") is None
    assert f"pretrain_draft: {model} is gone, to which " in caplog.text
    assert make(run, "once more") == entry
    assert (entry / "draft.json").read_text() == "once more"
    assert kept(run, recipe, STAGE, "k1") == entry
