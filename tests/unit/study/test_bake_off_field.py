"""Who takes part in a bake-off, and with which recipe."""

from __future__ import annotations

import pytest

from slipstream.config import ConfigError
from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.recipe import load_recipe
from slipstream.study.bake_off_field import entrant_recipe, entrants
from slipstream.study.bake_off_records import Entrant
from tests.unit.lagging import ONE_STEP_OFF

OFFLINE = Entrant(method=DraftMethod.EAGLE3, init=DraftInit.GENERAL, online=DraftOnline.OFF)


def test_a_lookup_takes_part_once_whatever_prompts_and_training_are_tried() -> None:
    field = entrants(
        [DraftMethod.EAGLE3, DraftMethod.DRAFT_MODEL, DraftMethod.NGRAM], list(DraftInit)[:2], list(DraftOnline)[:2]
    )
    assert [entrant.name for entrant in field] == [
        "eagle3-in_domain-off",
        "eagle3-in_domain-always",
        "eagle3-general-off",
        "eagle3-general-always",
        "draft_model-in_domain-off",
        "draft_model-general-off",
        "ngram-off",
    ]


@pytest.mark.parametrize(
    ("methods", "message"),
    [([], "methods must name at least one value"), ([DraftMethod.NGRAM] * 2, "methods must name each value once")],
)
def test_a_list_that_says_nothing_or_one_thing_twice_is_refused(methods: list[DraftMethod], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entrants(methods, [DraftInit.IN_DOMAIN], [DraftOnline.OFF])


def test_an_entrant_has_the_recipe_but_for_its_draft_and_room_for_its_tokens() -> None:
    recipe = load_recipe("tiny")
    own = entrant_recipe(recipe, OFFLINE, 3)
    assert (own.draft.method, own.draft.init, own.draft.online) == (
        DraftMethod.EAGLE3,
        DraftInit.GENERAL,
        DraftOnline.OFF,
    )
    assert own.tuning.candidate_ks == (0, 3)
    assert (own.grpo, own.sampling, own.learner, own.policy) == (
        recipe.grpo,
        recipe.sampling,
        recipe.learner,
        recipe.policy,
    )


@pytest.mark.parametrize(("k", "message"), [(0, "num_speculative_tokens must be >= 1"), (99, "drafter eagle3-general")])
def test_what_the_recipe_cannot_do_names_the_drafter(k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entrant_recipe(load_recipe("tiny"), OFFLINE, k)


def test_learners_that_live_at_once_cannot_have_memory_in_turn() -> None:
    recipe = load_recipe("qwen3_8b", overrides={"placement": {"memory": "in_turn"}})
    with pytest.raises(ConfigError, match=r"^drafter eagle3-general-off: placement\.memory must be 'shared' in a bake"):
        entrant_recipe(recipe, OFFLINE, 3)


def test_steps_in_turn_are_of_no_asynchronous_recipe() -> None:
    recipe = load_recipe("tiny", overrides=ONE_STEP_OFF)
    with pytest.raises(ConfigError, match=r"^drafter eagle3-general-off: loop\.mode must be synchronous here"):
        entrant_recipe(recipe, OFFLINE, 3)
