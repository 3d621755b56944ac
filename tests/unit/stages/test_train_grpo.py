"""The labels of an arm's run are true for that arm."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config import ConfigError
from slipstream.drafts.length import DraftLength
from slipstream.recipe import load_recipe, parameters
from slipstream.records.files import write_record
from slipstream.records.stages import TuningRecord
from slipstream.records.steps import ScheduleEntry
from slipstream.stages.certify_losslessness import tuned_length
from slipstream.stages.context import arm_node
from slipstream.stages.recipe_engines import draft_length
from slipstream.stages.train_grpo import arm_labels, in_loop
from slipstream.types import Arm, ArmLoop
from tests.unit.lagging import ONE_STEP_OFF
from tests.unit.stages.tuned import tuned


def test_an_arm_that_drafts_is_labelled_with_its_k_and_the_recipes_draft() -> None:
    assert arm_labels(load_recipe("tiny"), Arm.SPECULATIVE, DraftLength(num_speculative_tokens=5)) == {
        "arm": "speculative",
        "k": "5",
        "loop": "synchronous",
        "max_off_policy_steps": "0",
        "draft.method": "eagle3",
        "draft.init": "in_domain",
    }


def test_an_arm_without_drafts_has_none_also_where_speculation_lost() -> None:
    recipe = load_recipe("tiny")
    for arm in Arm:
        labels = arm_labels(recipe, arm, DraftLength(num_speculative_tokens=0))
        assert labels == {
            "arm": arm.value,
            "k": "0",
            "loop": "synchronous",
            "max_off_policy_steps": "0",
            "draft.method": "none",
            "draft.init": "none",
        }
        assert {name for name in labels if name in parameters(recipe)} == {"draft.method", "draft.init"}


def test_the_arms_of_both_loops_share_neither_node_nor_policy_nor_labels() -> None:
    recipe = load_recipe("tiny", overrides=ONE_STEP_OFF)
    each = [(arm, loop) for loop in ArmLoop for arm in Arm]
    assert [arm_node(*one) for one in each] == [
        "train_grpo_autoregressive",
        "train_grpo_speculative",
        "train_grpo_autoregressive_asynchronous",
        "train_grpo_speculative_asynchronous",
    ]
    length = DraftLength(num_speculative_tokens=0)
    labels = [tuple(arm_labels(in_loop(recipe, loop), arm, length).values()) for arm, loop in each]
    assert len(set(labels)) == 4


def test_the_synchronous_arm_of_an_asynchronous_recipe_is_that_of_the_recipe_without_the_loop() -> None:
    plain = load_recipe("tiny", overrides={"grpo": ONE_STEP_OFF["grpo"]})
    recipe = load_recipe("tiny", overrides=ONE_STEP_OFF)
    assert in_loop(recipe, ArmLoop.SYNCHRONOUS) == plain
    assert in_loop(recipe, ArmLoop.ASYNCHRONOUS) is recipe
    assert arm_labels(recipe, Arm.SPECULATIVE, DraftLength(num_speculative_tokens=5))["loop"] == "one_step_off"
    with pytest.raises(ConfigError, match="must be one_step_off or in_flight here, got 'synchronous'"):
        in_loop(plain, ArmLoop.ASYNCHRONOUS)


def test_an_arm_that_drafts_by_the_running_batch_says_so() -> None:
    schedule = tuple(
        ScheduleEntry(batch_from=start, batch_to=end, num_speculative_tokens=k)
        for start, end, k in ((1, 8, 5), (9, 48, 2))
    )
    length = DraftLength(num_speculative_tokens=5, schedule=schedule)
    assert arm_labels(load_recipe("tiny"), Arm.SPECULATIVE, length)["k"] == "by_batch"


def test_what_is_certified_is_what_trained_or_the_longest_draft_that_lost(tmp_path: Path) -> None:
    by_batch = load_recipe("tiny", overrides={"draft": {"length": "by_batch"}})
    tuning = tuned(tmp_path, (1, 8, 5), (9, 48, 2))
    assert tuned_length(by_batch, tuning) == draft_length(by_batch, tuning)
    write_record(TuningRecord(chosen_k=0, reason="lost", points=(), schedule=()), tmp_path / "tuning.json")
    assert tuned_length(by_batch, tmp_path) == DraftLength(num_speculative_tokens=7)
