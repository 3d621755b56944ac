"""A grid of an ablation, and the parts that it takes to run it: pure, before anything starts.

Extend it by adding to the enums of `drafts.config`: what they hold, a grid may name. The part is what runs once:

    policy      a workload's, with the data
    draft       of a workload, initialisation, method, loss and seed; every draft length takes the same one
    baseline    the autoregressive arm of a workload and seed, which every variant of both is compared with
    variant     the speculative arm of one point of the grid
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import product
from typing import Any

from slipstream.config import ConfigError, merge, require
from slipstream.drafts.config import DraftInit, DraftMethod
from slipstream.recipe import Recipe, load_recipe, resolve_recipe
from slipstream.stages.context import require_loop
from slipstream.study.ablation_records import Setting, Variant
from slipstream.types import ArmLoop, Workload

MAX_VARIANTS = 64
_OWN_INPUTS = {
    "draft.init": "draft_inits",
    "draft.method": "methods",
    "draft.loss": "losses",
    "draft.seed": "seeds",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Kind(StrEnum):
    """What a part makes."""

    POLICY = "policy"
    DRAFT = "draft"
    BASELINE = "baseline"
    VARIANT = "variant"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Lists of values to compare: every combination is a variant. An empty list keeps what the recipe says."""

    draft_inits: tuple[DraftInit, ...] = ()
    methods: tuple[DraftMethod, ...] = ()
    losses: tuple[str, ...] = ()
    draft_lengths: tuple[int, ...] = ()  # k; 0, or no list: chosen by measured time, as `tune_draft_length` chooses it
    seeds: tuple[int, ...] = ()
    workloads: tuple[Workload, ...] = ()

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
        """All variants of `recipes`, the ablation's for each workload; those that share a baseline lie together."""
        return tuple(
            Variant(
                setting=Setting(
                    workload=recipe.workload, init=init, method=method, loss=loss, num_speculative_tokens=k
                ),
                seed=seed,
            )
            for recipe in recipes
            for seed, init, method, loss, k in product(
                self.seeds or (recipe.grpo.seed,),
                self.draft_inits or (recipe.draft.init,),
                self.methods or (recipe.draft.method,),
                self.losses or (recipe.draft.loss,),
                self.draft_lengths or (0,),
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What is made once, by one task. Its recipe is that of `variant`; a policy and a baseline ignore its draft."""

    name: str
    kind: Kind
    variant: Variant
    needs: tuple[str, ...]  # parts that must be finished before


def parts(variants: Iterable[Variant]) -> tuple[Part, ...]:
    """The parts of all `variants`, each after those that it needs."""
    found: dict[str, Part] = {}
    for variant in variants:
        for part in _parts_of(variant):
            found.setdefault(part.name, part)
    order = list(Kind)
    return tuple(sorted(found.values(), key=lambda part: order.index(part.kind)))


def _parts_of(variant: Variant) -> tuple[Part, ...]:
    setting, seed = variant.setting, f"seed{variant.seed}"
    policy = f"policy-{setting.workload.value}"
    draft = f"draft-{setting.draft_name}-{seed}"
    baseline = f"baseline-{setting.workload.value}-{seed}"
    return (
        Part(name=policy, kind=Kind.POLICY, variant=variant, needs=()),
        Part(name=draft, kind=Kind.DRAFT, variant=variant, needs=(policy,)),
        Part(name=baseline, kind=Kind.BASELINE, variant=variant, needs=(policy,)),
        Part(name=variant.name, kind=Kind.VARIANT, variant=variant, needs=(policy, draft, baseline)),
    )


def chosen_seeds(seeds: Iterable[int], kickoff_time: datetime) -> tuple[int, ...]:
    """The seeds that are given, else the one of a schedule's kickoff, else none: the recipe's is kept."""
    given = tuple(seeds)
    day = kickoff_day(kickoff_time)
    return given or ((day,) if day else ())


def kickoff_day(kickoff_time: datetime) -> int:
    """Days from 1970-01-01 to the kickoff in UTC, the seed of what a schedule starts; 0 without a schedule."""
    moment = kickoff_time if kickoff_time.tzinfo is not None else kickoff_time.replace(tzinfo=UTC)
    return (moment - _EPOCH).days


def variant_recipes(
    name: str, grid: Grid, requested: Mapping[str, Any]
) -> dict[Variant, tuple[Recipe, dict[str, str]]]:
    """Every variant of an ablation with its recipe, and who gave the recipe's values, as `resolve_recipe` says.

    Args:
        name: of the ablation's recipe, or a path to it.
        requested: what the launch overrides for all of them.
    Raises:
        ConfigError: the recipe refuses a variant, which the error names.
    """
    require_free(requested)
    recipes = [load_recipe(name, workload=of, overrides=requested) for of in grid.workloads or (None,)]
    return {variant: _variant_recipe(name, variant, requested, grid) for variant in grid.variants(recipes)}


def _variant_recipe(
    name: str, variant: Variant, requested: Mapping[str, Any], grid: Grid
) -> tuple[Recipe, dict[str, str]]:
    """The recipe of one variant, in which only what the grid lists is changed."""
    setting = variant.setting
    listed = {
        "init": setting.init.value if grid.draft_inits else None,
        "method": setting.method.value if grid.methods else None,
        "loss": setting.loss if grid.losses else None,
        "seed": variant.seed if grid.seeds else None,
    }
    own: dict[str, Any] = {"draft": {field: value for field, value in listed.items() if value is not None}}
    if grid.seeds:
        own["grpo"] = {"seed": variant.seed}
    if setting.num_speculative_tokens:  # the engine must have room for it
        own["tuning"] = {"candidate_ks": [0, setting.num_speculative_tokens]}
    workload = setting.workload if grid.workloads else None
    try:
        resolved = resolve_recipe(name, workload=workload, overrides=merge(requested, own))
        require_loop(resolved[0], ArmLoop.SYNCHRONOUS)
    except ConfigError as error:
        raise ConfigError(f"variant {variant.name}: {error}") from error
    return resolved


def require_free(requested: Mapping[str, Any]) -> None:
    """Refuse overrides of what the grid varies."""
    draft = requested.get("draft", {})
    taken = [name for name in _OWN_INPUTS if isinstance(draft, Mapping) and name.partition(".")[2] in draft]
    if taken:
        require(False, "overrides", f"must leave out {taken[0]}", taken[0], f"give the input {_OWN_INPUTS[taken[0]]}")
