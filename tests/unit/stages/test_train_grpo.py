"""The labels of an arm's run are true for that arm."""

from __future__ import annotations

from slipstream.recipe import load_recipe, parameters
from slipstream.stages.train_grpo import arm_labels
from slipstream.types import Arm


def test_an_arm_that_drafts_is_labelled_with_its_k_and_the_recipes_draft() -> None:
    assert arm_labels(load_recipe("tiny"), Arm.SPECULATIVE, 5) == {
        "arm": "speculative",
        "k": "5",
        "draft.method": "eagle3",
        "draft.init": "in_domain",
    }


def test_an_arm_without_drafts_has_none_also_where_speculation_lost() -> None:
    recipe = load_recipe("tiny")
    for arm in Arm:
        labels = arm_labels(recipe, arm, 0)
        assert labels == {"arm": arm.value, "k": "0", "draft.method": "none", "draft.init": "none"}
        assert {name for name in labels if name in parameters(recipe)} == {"draft.method", "draft.init"}
