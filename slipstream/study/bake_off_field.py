"""Who takes part in a bake-off, and the recipe of each: pure, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slipstream.config import ConfigError, require
from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.drafts.methods import TRAITS, Training, require_package
from slipstream.recipe import Recipe
from slipstream.stages.context import require_loop
from slipstream.study.bake_off_records import Entrant
from slipstream.types import ArmLoop

MAX_ENTRANTS = 24


def entrants(
    methods: Iterable[DraftMethod], inits: Iterable[DraftInit], online: Iterable[DraftOnline]
) -> tuple[Entrant, ...]:
    """Every combination that is one: what is not pretrained has no prompts, what cannot be trained in RL is not.

    Raises:
        ConfigError: a list is empty or names a value twice, none or too many are left.
    """
    lists = {"methods": tuple(methods), "inits": tuple(inits), "online": tuple(online)}
    for name, values in lists.items():
        require(bool(values), name, "must name at least one value", values)
        require(len(set(values)) == len(values), name, "must name each value once", values)
    found = [
        Entrant(method=method, init=init, online=when)
        for method in lists["methods"]
        for init in (lists["inits"] if TRAITS[method].training is not Training.NONE else (None,))
        for when in (lists["online"] if TRAITS[method].trains_online else (DraftOnline.OFF,))
    ]
    rule = f"must be at most {MAX_ENTRANTS}"
    require(len(found) <= MAX_ENTRANTS, "the number of drafters", rule, len(found), "shorten one of the lists")
    return tuple(found)


def entrant_recipe(recipe: Recipe, entrant: Entrant, k: int) -> Recipe:
    """The recipe with which an entrant drafts `k` tokens.

    Raises:
        ConfigError: the recipe refuses the entrant, which the error names.
    """
    require(k >= 1, "num_speculative_tokens", "must be >= 1", k)
    init = recipe.draft.init if entrant.init is None else entrant.init
    try:
        require_loop(recipe, ArmLoop.SYNCHRONOUS)  # steps in turn are one after another
        require_package(entrant.method)
        require(
            not recipe.placement.takes_turns,
            "placement.memory",
            "must be 'shared' in a bake-off",
            recipe.placement.memory.value,
            "there several learners live at once, and each would wait with all its memory",
        )
        return replace(
            recipe,
            draft=replace(recipe.draft, method=entrant.method, init=init, online=entrant.online),
            tuning=replace(recipe.tuning, candidate_ks=(0, k)),  # the engine must have room for it
            engine=replace(recipe.engine, num_kept_idle=min(recipe.engine.num_kept_idle, 1)),
        )
    except ConfigError as error:
        raise ConfigError(f"drafter {entrant.name}: {error}") from error
