"""Plan of a study: its variants, their recipes, and the parts that produce them. Pure functions only.

An ablation trains its variants one by one; a bake-off alternates their steps. A new value of an enum in `drafts.config`
is available to both. A part of an ablation runs once:

    policy      a workload's policy and data
    draft       one of a workload, initialisation, method, loss and seed, shared by all draft lengths
    baseline    the autoregressive arm of a workload and seed, with which all its variants are compared
    variant     the speculative arm of one point of the grid
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from itertools import product
from typing import Any

from slipstream.config import ConfigError, merge, require
from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.drafts.methods import TRAITS, Training, require_package
from slipstream.recipe import Recipe, leaves, load_recipe, resolve_recipe
from slipstream.stages.context import require_loop
from slipstream.types import ArmLoop, Workload

MAX_VARIANTS, MAX_DRAFTERS = 64, 24
TUNED = "tuned"
"""Name of a draft length that is chosen by measured time, as in a run of the whole chain."""
_OWN_INPUTS = {"init": "draft_inits", "method": "methods", "eagle3.loss": "losses", "seed": "seeds"}
"""Inputs of a study, by the field of `draft` that each varies."""
_ANY_INIT = DraftInit.IN_DOMAIN  # for a method that reads none, which takes this one


class Study(StrEnum):
    """Kinds of study, named like their workflow and their page's file."""

    ABLATION = "ablation"
    BAKE_OFF = "bake_off"

    @property
    def node(self) -> str:
        """Name of the task that writes the page."""
        return "rank_ablation" if self is Study.ABLATION else "bake_off"


class Kind(StrEnum):
    """Kind of a part."""

    POLICY = "policy"
    DRAFT = "draft"
    BASELINE = "baseline"
    VARIANT = "variant"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One point of a grid without its seed."""

    workload: Workload
    method: DraftMethod
    init: DraftInit | None  # None where nothing is pretrained
    loss: str  # empty where the method has no choice of it
    num_speculative_tokens: int  # 0 is tuned
    online: DraftOnline | None = None  # None keeps the recipe's value, as in an ablation

    @property
    def draft_name(self) -> str:
        """Name of the draft; settings that differ only in draft length share it."""
        return "-".join(filter(None, (self.workload, self.init, self.method, self.loss)))

    @property
    def name(self) -> str:
        """Name of the setting in directories and runs; a bake-off names the drafter alone."""
        if self.online is None:
            return f"{self.draft_name}-k{self.num_speculative_tokens or f'-{TUNED}'}"
        return "-".join(filter(None, (self.method, self.init, self.online)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One setting with one seed, trained once."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """Name of the variant in directories and runs; a bake-off has one seed and leaves it out."""
        return f"{self.setting.name}-seed{self.seed}" if self.setting.online is None else self.setting.name


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Lists of values to compare, of which every combination is a variant; an empty list keeps the recipe's value."""

    draft_inits: tuple[DraftInit, ...] = ()
    methods: tuple[DraftMethod, ...] = ()
    losses: tuple[str, ...] = ()
    draft_lengths: tuple[int, ...] = ()  # k; 0 or an empty list is tuned by `tune_draft_length`
    seeds: tuple[int, ...] = ()
    workloads: tuple[Workload, ...] = ()
    online: tuple[DraftOnline, ...] = ()  # bake-offs only

    def __post_init__(self) -> None:
        number = 1
        for name, values in vars(self).items():
            require(len(set(values)) == len(values), name, "must name each value once", values)
            number *= max(1, len(values))
        require(min(self.draft_lengths, default=0) >= 0, "draft_lengths", "must be >= 0", self.draft_lengths, "0 tunes")
        require(min(self.seeds, default=0) >= 0, "seeds", "must be >= 0", self.seeds)
        rule = f"must have at most {MAX_VARIANTS} variants"
        require(number <= MAX_VARIANTS, "the grid", rule, number, "shorten one of its lists, or run two ablations")

    def variants(self, recipes: Iterable[Recipe]) -> tuple[Variant, ...]:
        """Return all variants of `recipes`, one recipe a workload; variants with the same baseline are adjacent.

        A method without pretraining has no prompts, one without a choice of losses none, and in a bake-off a method
        without training in RL stays fixed.
        """
        found: dict[Variant, None] = {}
        for recipe in recipes:
            for seed, method, init, loss, k, online in product(
                self.seeds or (recipe.grpo.seed,),
                self.methods or (recipe.draft.method,),
                self.draft_inits or (recipe.draft.init,),
                self.losses or (recipe.draft.eagle3.loss,),
                self.draft_lengths or (0,),
                self.online or (None,),
            ):
                traits = TRAITS[method]
                setting = Setting(
                    workload=recipe.workload,
                    method=method,
                    init=None if traits.training is Training.NONE else init,
                    loss=loss if "eagle3" in traits.fields else "",
                    num_speculative_tokens=k,
                    online=DraftOnline.OFF if online and not traits.trains_online else online,
                )
                found[Variant(setting=setting, seed=seed)] = None
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One task of an ablation. A policy and a baseline ignore the draft of `variant`'s recipe."""

    name: str
    kind: Kind
    variant: Variant
    needs: tuple[str, ...]  # names of the parts that finish before this one starts


def parts(variants: Iterable[Variant]) -> tuple[Part, ...]:
    """Return the parts of all `variants`; each part follows the parts that it needs."""
    found: dict[str, Part] = {}
    for variant in variants:
        setting, seed = variant.setting, f"seed{variant.seed}"
        policy = f"policy-{setting.workload.value}"
        draft = f"draft-{setting.draft_name}-{seed}"
        baseline = f"baseline-{setting.workload.value}-{seed}"
        for name, kind, needs in (
            (policy, Kind.POLICY, ()),
            (draft, Kind.DRAFT, (policy,)),
            (baseline, Kind.BASELINE, (policy,)),
            (variant.name, Kind.VARIANT, (policy, draft, baseline)),
        ):
            found.setdefault(name, Part(name=name, kind=kind, variant=variant, needs=needs))
    order = list(Kind)
    return tuple(sorted(found.values(), key=lambda part: order.index(part.kind)))


def chosen_seeds(seeds: Iterable[int], *, day: int | None = None) -> tuple[int, ...]:
    """Return the given seeds, else that of the day, else none to keep the recipe's."""
    return tuple(seeds) or (() if day is None else (day,))


def day_seed(moment: datetime) -> int:
    """Number of days from 1970-01-01 to `moment` in UTC, which seeds a recurring run."""
    return int(moment.timestamp() // 86400)


def variant_recipes(
    name: str, grid: Grid, requested: Mapping[str, Any]
) -> dict[Variant, tuple[Recipe, dict[str, str]]]:
    """Resolve the recipe of every variant of an ablation, with the provenance of its values (`resolve_recipe`).

    Args:
        requested: overrides of all variants, without the fields that the grid varies.
    Raises:
        ConfigError: a variant's recipe breaks a rule; the error names the variant.
    """
    taken = leaves(requested)
    for field, own in _OWN_INPUTS.items():
        varied = f"draft.{field}"
        require(varied not in taken, "overrides", f"must leave out {varied}", varied, f"give the input {own}")
    recipes = [load_recipe(name, workload=of, overrides=requested) for of in grid.workloads or (None,)]
    return {variant: _variant_recipe(name, variant, requested, grid) for variant in grid.variants(recipes)}


def _variant_recipe(
    name: str, variant: Variant, requested: Mapping[str, Any], grid: Grid
) -> tuple[Recipe, dict[str, str]]:
    """Resolve the recipe of one variant, which differs from the ablation's recipe only in the grid's fields."""
    setting = variant.setting
    draft = {
        **({"init": (setting.init or _ANY_INIT).value} if grid.draft_inits or setting.init is None else {}),
        **({"method": setting.method.value, **_no_model(setting.method)} if grid.methods else {}),
        **({"eagle3": {"loss": setting.loss}} if grid.losses and setting.loss else {}),
        **({"seed": variant.seed} if grid.seeds else {}),
    }
    own: dict[str, Any] = {"draft": draft}
    if grid.seeds:
        own["grpo"] = {"seed": variant.seed}
    if setting.num_speculative_tokens:  # the engine allocates room for the longest candidate
        own["tuning"] = {"candidate_ks": [0, setting.num_speculative_tokens]}
    workload = setting.workload if grid.workloads else None
    try:
        resolved = resolve_recipe(name, workload=workload, overrides=merge(requested, own))
        require_loop(resolved[0], ArmLoop.SYNCHRONOUS)
    except ConfigError as error:
        raise ConfigError(f"variant {variant.name}: {error}") from error
    return resolved


def _no_model(method: DraftMethod) -> dict[str, Any]:
    """Leave out the draft that a recipe gives to another method; empty for a method that reads one."""
    return {} if "model" in TRAITS[method].fields else {"model": None}


def drafter_recipes(recipe: Recipe, grid: Grid) -> dict[Variant, Recipe]:
    """Return every drafter of a bake-off with its recipe; an error names the drafter whose recipe breaks a rule."""
    for name in ("methods", "draft_inits", "online", "draft_lengths"):
        require(bool(getattr(grid, name)), name, "must name at least one value", ())
    require(grid.draft_lengths[0] >= 1, "num_speculative_tokens", "must be >= 1", grid.draft_lengths[0])
    drafters = grid.variants([recipe])
    rule = f"must be at most {MAX_DRAFTERS}"
    require(len(drafters) <= MAX_DRAFTERS, "the number of drafters", rule, len(drafters), "shorten one of the lists")
    return {drafter: _drafter_recipe(recipe, drafter.setting) for drafter in drafters}


def _drafter_recipe(recipe: Recipe, setting: Setting) -> Recipe:
    """Return the recipe of one drafter, which differs from the bake-off's recipe only in its draft."""
    assert setting.online is not None
    try:
        require_loop(recipe, ArmLoop.SYNCHRONOUS)  # arms can alternate only between whole steps
        require_package(setting.method)
        rule, got = "must be 'shared' in a bake-off", recipe.placement.memory.value
        fix = "there several learners live at once, and each would wait with all its memory"
        require(not recipe.placement.takes_turns, "placement.memory", rule, got, fix)
        init, online = setting.init or _ANY_INIT, replace(recipe.draft.online, when=setting.online)
        return replace(
            recipe,
            draft=replace(recipe.draft, method=setting.method, init=init, online=online, **_no_model(setting.method)),
            # The engine has room for that k alone, and as in tuning several engines live at once.
            tuning=replace(
                recipe.tuning, candidate_ks=(0, setting.num_speculative_tokens), gpu_memory_utilization=None
            ),
            engine=replace(recipe.swept_engine, num_kept_idle=min(recipe.engine.num_kept_idle, 1)),
        )
    except ConfigError as error:
        raise ConfigError(f"drafter {setting.name}: {error}") from error
