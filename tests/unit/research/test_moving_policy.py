"""The benchmark of a moving policy: what sets the arms apart, what is printed of them, and where they start."""

from __future__ import annotations

from pathlib import Path

from research.habit import Start
from research.moving_policy import Contestant, recipe_of, row
from slipstream.drafts.config import DraftOnline
from slipstream.recipe import load_recipe
from slipstream.records.files import write_record
from slipstream.records.stages import DraftRecord


def metrics(length: float, *, train_s: float = 0.0) -> dict[str, float]:
    return {
        "spec/mean_acceptance_length": length,
        "train/reward": 0.5,
        "time/step_s": 2.0,
        "draft/trained": float(train_s > 0),
        "draft/train_s": train_s,
    }


def test_arms_differ_in_how_the_draft_learns_and_in_the_rate_alone() -> None:
    contestant = Contestant(online=DraftOnline.WHEN_STALE, learning_rate=5e-4)
    recipe = recipe_of(load_recipe("tiny"), contestant, {"grpo": {"num_steps": 7}}, k=5)
    assert contestant.name == "when_stale, 5.0e-04"
    assert recipe.draft.online.when is DraftOnline.WHEN_STALE
    assert (recipe.grpo.optimizer.learning_rate, recipe.grpo.num_steps) == (5e-4, 7)
    assert recipe.tuning.candidate_ks == (0, 5)


def test_a_rate_of_the_draft_is_the_recipes_unless_the_arm_has_its_own() -> None:
    tiny = load_recipe("tiny")
    own = Contestant(online=DraftOnline.ALWAYS, learning_rate=5e-4, draft_rate=3e-3)
    plain = Contestant(online=DraftOnline.ALWAYS, learning_rate=5e-4)
    assert own.name == "always at 3.0e-03, 5.0e-04"
    assert recipe_of(tiny, own, {}, k=5).draft.online.optimizer.learning_rate == 3e-3
    assert (
        recipe_of(tiny, plain, {}, k=5).draft.online.optimizer.learning_rate
        == tiny.draft.online.optimizer.learning_rate
        != 3e-3
    )


def test_a_row_shows_quarters_trainings_and_what_they_took() -> None:
    steps = [metrics(4.0), metrics(3.0, train_s=0.5), metrics(2.0, train_s=0.25), metrics(3.0)]
    assert row("a", steps, "whole") == ["a", "4", "", "4.00", "3.00", "3.00", "2", "0.8", "2.00", "0.500, 0.500"]


def test_a_start_says_what_the_draft_reaches_and_how_much_work_the_policy_shows(tmp_path: Path) -> None:
    record = DraftRecord(
        method="eagle3",
        init="in_domain",
        num_parameters=1,
        num_training_tokens=1,
        num_steps=1,
        losses=(0.1,),
        heldout_rate_by_position=(0.9,),
        heldout_mean_acceptance_length=1.9,
        elapsed_s=1.0,
    )
    write_record(record, tmp_path / "draft.json")
    start = Start(policy=tmp_path, draft=tmp_path)
    assert start.described() == "start: held-out acceptance length of the draft 1.90"
    counted = Start(policy=tmp_path, draft=tmp_path, share_of_work=0.05)
    assert counted.described().endswith("; 5.0 % of answers with work")
