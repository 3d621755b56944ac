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
from slipstream.recipe import Recipe, load_recipe
from slipstream.report.ablation_records import Setting, Variant
from slipstream.stages.launch import require_loop
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
    """Every combination of these is a variant."""

    draft_inits: tuple[DraftInit, ...]
    methods: tuple[DraftMethod, ...]
    losses: tuple[str, ...]
    draft_lengths: tuple[int, ...]  # k; 0: chosen by measured time, as `tune_draft_length` chooses it
    seeds: tuple[int, ...]
    workloads: tuple[Workload, ...]

    def __post_init__(self) -> None:
        for name in ("draft_inits", "methods", "losses", "draft_lengths", "seeds", "workloads"):
            values: tuple[Any, ...] = getattr(self, name)
            require(bool(values), name, "must name at least one value", values)
            require(len(set(values)) == len(values), name, "must name each value once", values)
        require(min(self.draft_lengths) >= 0, "draft_lengths", "must be >= 0", self.draft_lengths, "0 is tuned")
        require(min(self.seeds) >= 0, "seeds", "must be >= 0", self.seeds)
        number = len(self.variants())
        rule = f"must have at most {MAX_VARIANTS} variants"
        require(number <= MAX_VARIANTS, "the grid", rule, number, "shorten one of its lists, or run two ablations")

    def variants(self) -> tuple[Variant, ...]:
        """All of them; those that share a baseline lie together."""
        return tuple(
            Variant(
                setting=Setting(workload=workload, init=init, method=method, loss=loss, num_speculative_tokens=k),
                seed=seed,
            )
            for workload, seed, init, method, loss, k in product(
                self.workloads, self.seeds, self.draft_inits, self.methods, self.losses, self.draft_lengths
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
    """The seeds that are given, else one that follows from the day of the kickoff, as a schedule has no other.

    It is the number of days since 1970-01-01 in UTC: 0 for the default of the launch form.
    """
    given = tuple(seeds)
    if given:
        return given
    moment = kickoff_time if kickoff_time.tzinfo is not None else kickoff_time.replace(tzinfo=UTC)
    return ((moment - _EPOCH).days,)


def variant_recipe(name: str, variant: Variant, requested: Mapping[str, Any]) -> Recipe:
    """The recipe of one variant.

    Args:
        name: of the ablation's recipe, or a path to it.
        requested: what the launch overrides for all of them.
    Raises:
        ConfigError: the recipe refuses the variant, which the error names.
    """
    require_free(requested)
    setting = variant.setting
    own: dict[str, Any] = {
        "draft": {
            "init": setting.init.value,
            "method": setting.method.value,
            "loss": setting.loss,
            "seed": variant.seed,
        },
        "grpo": {"seed": variant.seed},
    }
    if setting.num_speculative_tokens:  # the engine must have room for it
        own["tuning"] = {"candidate_ks": [0, setting.num_speculative_tokens]}
    try:
        recipe = load_recipe(name, workload=setting.workload, overrides=merge(requested, own))
        require_loop(recipe, ArmLoop.SYNCHRONOUS)
    except ConfigError as error:
        raise ConfigError(f"variant {variant.name}: {error}") from error
    return recipe


def require_free(requested: Mapping[str, Any]) -> None:
    """Refuse overrides of what the grid varies."""
    draft = requested.get("draft", {})
    taken = [name for name in _OWN_INPUTS if isinstance(draft, Mapping) and name.partition(".")[2] in draft]
    if taken:
        require(False, "overrides", f"must leave out {taken[0]}", taken[0], f"give the input {_OWN_INPUTS[taken[0]]}")
