"""A grid becomes every combination once, its parts each once, and what cannot be is refused before anything starts."""

from datetime import UTC, datetime, timedelta, timezone
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import parse_overrides
from slipstream.drafts.config import FRESH_INITS, DraftInit, DraftMethod, DraftOnline
from slipstream.recipe import CONFIGS, Recipe, load_recipe, write_recipe
from slipstream.study.variants import (
    MAX_VARIANTS,
    Grid,
    Kind,
    Variant,
    chosen_seeds,
    day_seed,
    drafter_recipes,
    parts,
    variant_recipes,
)
from slipstream.types import Workload
from tests.unit.conftest import Refusal
from tests.unit.lagging import ONE_STEP_OFF

ONE: dict[str, Any] = {
    "draft_inits": (DraftInit.IN_DOMAIN,),
    "methods": (DraftMethod.EAGLE3,),
    "losses": ("kl_div",),
    "draft_lengths": (3,),
    "seeds": (0,),
    "workloads": (Workload.RL_ZERO,),
}


def some(values: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=1, max_size=most, unique=True).map(tuple)


SHORTER = "shorten one of its lists, or run two ablations"
DRAFT_FIELDS = ("init", "method", "eagle3.loss", "seed")
TINY = {workload: load_recipe("tiny", workload=workload) for workload in Workload}


def variants_of(grid: Grid) -> tuple[Variant, ...]:
    return grid.variants(TINY[workload] for workload in grid.workloads)


def recipes_of(*overrides: str, recipe: str = "tiny", **grid: Any) -> list[Recipe]:
    return [found for found, _ in variant_recipes(recipe, Grid(**grid), parse_overrides(overrides)).values()]


GRIDS = st.builds(
    Grid,
    draft_inits=some(st.sampled_from(FRESH_INITS), 2),
    methods=st.just((DraftMethod.EAGLE3,)),  # it reads the other lists
    losses=some(st.sampled_from(("kl_div", "tv", "lk")), 2),
    draft_lengths=some(st.integers(0, 9), 2),
    seeds=some(st.integers(0, 99), 4),
    workloads=some(st.sampled_from(Workload), 2),
)


@given(GRIDS)
def test_every_combination_is_one_variant_with_a_name_of_its_own(grid: Grid) -> None:
    variants = variants_of(grid)
    num = prod(len(values) for values in vars(grid).values() if values)
    assert len(variants) == len(set(variants)) == len({variant.name for variant in variants}) == num
    assert {variant.seed for variant in variants} == set(grid.seeds)
    assert {variant.setting.num_speculative_tokens for variant in variants} == set(grid.draft_lengths)


@given(GRIDS)
def test_what_variants_share_is_made_once_and_before_it_is_needed(grid: Grid) -> None:
    made = parts(variants_of(grid))
    names = [part.name for part in made]
    number = {kind: sum(part.kind is kind for part in made) for kind in Kind}
    per_seed = len(grid.workloads) * len(grid.seeds)
    drafts = per_seed * len(grid.draft_inits) * len(grid.methods) * len(grid.losses)
    assert number == {
        Kind.POLICY: len(grid.workloads),
        Kind.DRAFT: drafts,
        Kind.BASELINE: per_seed,
        Kind.VARIANT: drafts * len(grid.draft_lengths),
    }
    assert len(set(names)) == len(names)
    for place, part in enumerate(made):
        assert set(part.needs) <= set(names[:place])


def test_a_variant_needs_the_policy_the_draft_and_the_baseline_of_its_own_seed() -> None:
    made = parts(variants_of(Grid(**{**ONE, "seeds": (0, 4)})))
    assert made[-1].name == "rl_zero-in_domain-eagle3-kl_div-k3-seed4"
    assert made[-1].needs == ("policy-rl_zero", "draft-rl_zero-in_domain-eagle3-kl_div-seed4", "baseline-rl_zero-seed4")


def test_a_length_of_0_or_none_is_one_that_is_tuned() -> None:
    for lengths in ((0,), ()):
        (variant,) = variants_of(Grid(**{**ONE, "draft_lengths": lengths}))
        assert variant.name == "rl_zero-in_domain-eagle3-kl_div-k-tuned-seed0"
        (tuned,) = recipes_of(**{**ONE, "draft_lengths": lengths})
        assert tuned.tuning.candidate_ks == (0, 3, 7, 10, 13)  # the recipe's own
    (fixed,) = recipes_of(**ONE)
    assert fixed.tuning.candidate_ks == (0, 3)


def test_a_list_that_is_left_out_keeps_what_the_recipe_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    own = {"grpo": {"seed": 5}, "draft": {"init": "general", "eagle3": {"loss": "tv"}, "seed": 9}}
    write_recipe(load_recipe("tiny", overrides={"workload": "rl_think", **own}), path)
    (recipe,) = recipes_of(recipe=str(path), draft_lengths=(3,))
    assert (recipe.workload, recipe.grpo.seed) == (Workload.RL_THINK, 5)
    assert (recipe.draft.init, recipe.draft.eagle3.loss, recipe.draft.seed) == (DraftInit.GENERAL, "tv", 9)
    (zero,) = recipes_of(recipe=str(path), draft_lengths=(3,), seeds=(0,), workloads=(Workload.RL_ZERO,))
    assert (zero.workload, zero.grpo.seed, zero.draft.seed) == (Workload.RL_ZERO, 0, 0)


def test_a_variants_recipe_says_of_what_the_grid_lists_alone_that_the_launch_gave_it() -> None:
    ((_, origins),) = variant_recipes("tiny", Grid(draft_lengths=(3,)), {}).values()
    assert [name for name, label in origins.items() if label == "launch"] == ["tuning.candidate_ks"]
    ((_, origins),) = variant_recipes("tiny", Grid(**ONE), {}).values()
    launched = ["workload", "tuning.candidate_ks", "grpo.seed", *(f"draft.{each}" for each in DRAFT_FIELDS)]
    assert sorted(name for name, label in origins.items() if label == "launch") == sorted(launched)


def test_each_workload_keeps_its_own_section_of_the_recipe(tmp_path: Path) -> None:
    values = yaml.safe_load((CONFIGS / "tiny.yaml").read_text())
    values["workloads"]["rl_think"]["draft"] = {"init": "general"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    zero, think = recipes_of(recipe=str(path), draft_lengths=(3,), workloads=tuple(Workload))
    assert (zero.draft.init, think.draft.init) == (DraftInit.IN_DOMAIN, DraftInit.GENERAL)
    assert (zero.engine.max_model_len, think.engine.max_model_len) == (288, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": (1, 1)}, "seeds must name each value once, got (1, 1)"),
        ({"draft_lengths": (-1,)}, "draft_lengths must be >= 0, got (-1,); 0 tunes"),
        ({"seeds": (-1,)}, "seeds must be >= 0, got (-1,)"),
        ({"seeds": tuple(range(MAX_VARIANTS + 1))}, f"the grid must have at most 64 variants, got 65; {SHORTER}"),
    ],
)
def test_an_unsound_grid_is_refused(refusal: Refusal, changes: dict[str, Any], message: str) -> None:
    assert refusal(Grid, **{**ONE, **changes}) == message
    assert len(variants_of(Grid(**{**ONE, "seeds": tuple(range(MAX_VARIANTS))}))) == MAX_VARIANTS  # the largest


def test_the_recipe_of_a_variant_follows_it_alone() -> None:
    grid = {**ONE, "draft_inits": (DraftInit.GENERAL,), "losses": ("tv",), "seeds": (5,)}
    (recipe,) = recipes_of("grpo.group_size=4", "tuning.batch_sizes=[8]", **grid)
    draft = recipe.draft
    assert (draft.init, draft.eagle3.loss, draft.seed, recipe.grpo.seed) == (DraftInit.GENERAL, "tv", 5, 5)
    assert (recipe.grpo.group_size, recipe.tuning.candidate_ks) == (4, (0, 3))


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"losses": ("mse",)}, {}, "variant rl_zero-in_domain-eagle3-mse-k3-seed0: draft.eagle3.loss must be one of"),
        ({}, ONE_STEP_OFF, "variant rl_zero-in_domain-eagle3-kl_div-k3-seed0: loop.mode must be synchronous here"),
        ({}, {"draft": {"init": "general"}}, "overrides must leave out draft.init, got 'draft.init'; give the input d"),
        ({}, {"draft": {"seed": 1}}, "overrides must leave out draft.seed, got 'draft.seed'; give the input seeds"),
    ],
)
def test_a_variant_that_the_recipe_refuses_is_named_and_so_is_an_override_of_what_the_grid_varies(
    refusal: Refusal, changes: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    grid = Grid(**{**ONE, **changes})
    assert refusal(variant_recipes, name="tiny", grid=grid, requested=overrides).startswith(message)


def test_seeds_that_are_given_win_over_the_days_which_is_that_of_utc() -> None:
    assert chosen_seeds([3, 1], day=20779) == (3, 1)
    assert chosen_seeds([0], day=20779) == (0,)
    assert chosen_seeds([]) == ()
    assert chosen_seeds([], day=30) == (30,)
    west = timezone(timedelta(hours=-5))
    assert day_seed(datetime(1970, 1, 31, 23, 59, tzinfo=UTC)) == 30
    assert day_seed(datetime(1970, 1, 31, 23, 59, tzinfo=west)) == 31


DRAFTERS: dict[str, Any] = {"methods": (DraftMethod.EAGLE3,), "draft_inits": (DraftInit.GENERAL,)}
DRAFTERS |= {"online": (DraftOnline.OFF,), "draft_lengths": (3,)}


def test_a_lookup_takes_part_once_whatever_prompts_and_training_are_tried() -> None:
    methods = (DraftMethod.EAGLE3, DraftMethod.DRAFT_MODEL, DraftMethod.NGRAM)
    grid = Grid(methods=methods, draft_inits=FRESH_INITS, online=tuple(DraftOnline)[:2], draft_lengths=(3,))
    pretrained = ["eagle3-in_domain-off", "eagle3-in_domain-always", "eagle3-general-off", "eagle3-general-always"]
    fixed = ["draft_model-in_domain-off", "draft_model-general-off", "ngram-off"]
    assert [drafter.name for drafter in drafter_recipes(load_recipe("tiny"), grid)] == pretrained + fixed


def test_a_draft_that_was_brought_is_compared_with_a_lookup() -> None:
    given = {"draft": {"init": "from_hub", "model": "org/draft", "eagle3": {"vocab_size": None}}}
    grid = Grid(**DRAFTERS | {"methods": (DraftMethod.EAGLE3, DraftMethod.NGRAM), "draft_inits": (DraftInit.FROM_HUB,)})
    found = drafter_recipes(load_recipe("tiny", overrides=given), grid)
    assert [drafter.name for drafter in found] == ["eagle3-from_hub-off", "ngram-off"]


def test_an_ablation_trains_what_does_not_read_a_list_once() -> None:
    methods = (DraftMethod.EAGLE3, DraftMethod.DFLASH, DraftMethod.NGRAM)
    grid: dict[str, Any] = ONE | {"methods": methods, "draft_inits": FRESH_INITS, "losses": ("kl_div", "tv")}
    found = variant_recipes("tiny", Grid(**grid), {})
    drafts = ["in_domain-eagle3-kl_div", "in_domain-eagle3-tv", "general-eagle3-kl_div", "general-eagle3-tv"]
    drafts += ["in_domain-dflash", "general-dflash", "ngram"]
    assert [variant.name for variant in found] == [f"rl_zero-{draft}-k3-seed0" for draft in drafts]
    assert [recipe.draft.init for recipe, _ in found.values()][-3:] == [*FRESH_INITS, DraftInit.IN_DOMAIN]
    assert len({recipe.fingerprint() for recipe, _ in found.values()}) == len(found)


def test_a_given_draft_model_is_compared_with_methods_that_read_none(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("{base: tiny, name: own, draft: {method: draft_model, model: a/draft}}")
    methods = (DraftMethod.DRAFT_MODEL, DraftMethod.NGRAM)
    drafters = drafter_recipes(load_recipe(str(own)), Grid(**{**DRAFTERS, "methods": methods}))
    variants = variant_recipes(str(own), Grid(methods=methods), {})
    for recipes in (drafters.values(), (recipe for recipe, _ in variants.values())):
        assert [recipe.draft.model for recipe in recipes] == ["a/draft", None]


def test_a_drafter_has_the_recipe_but_for_its_draft_and_room_for_its_tokens() -> None:
    recipe = load_recipe("tiny")
    ((drafter, own),) = drafter_recipes(recipe, Grid(**DRAFTERS)).items()
    assert (drafter.seed, drafter.setting.num_speculative_tokens) == (recipe.grpo.seed, 3)
    draft = (own.draft.method, own.draft.init, own.draft.online.when)
    assert draft == (DraftMethod.EAGLE3, DraftInit.GENERAL, DraftOnline.OFF)
    assert own.tuning.candidate_ks == (0, 3)
    assert all(getattr(own, name) == getattr(recipe, name) for name in ("grpo", "sampling", "learner", "policy"))


@pytest.mark.parametrize(
    ("changes", "recipe", "overrides", "message"),
    [
        ({"methods": ()}, "tiny", {}, "methods must name at least one value"),
        ({"draft_lengths": (0,)}, "tiny", {}, "num_speculative_tokens must be >= 1"),
        ({}, "tiny", ONE_STEP_OFF, "drafter eagle3-general-off: loop.mode must be synchronous here"),
        ({}, "qwen3_8b", {"placement": {"memory": "in_turn"}}, "drafter eagle3-general-off: placement.memory must be"),
    ],
)
def test_what_no_bake_off_can_do_is_refused_and_the_drafter_named(
    refusal: Refusal, changes: dict[str, Any], recipe: str, overrides: dict[str, Any], message: str
) -> None:
    grid, loaded = Grid(**{**DRAFTERS, **changes}), load_recipe(recipe, overrides=overrides)
    assert refusal(drafter_recipes, recipe=loaded, grid=grid).startswith(message)
