"""The free parameters of the cost model: what they are, what they are believed to be before any run is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache

from slipstream.config import Checked, PositiveFloat, from_mapping, require
from slipstream.simulator.cost.data_files import section


class Regime(StrEnum):
    """Explanations of the jump in cost between short and long drafts: the structural variants of the model."""

    SMOOTH = "smooth"  # there is none
    CAPTURED = "captured"  # more tokens than the largest captured CUDA graph run eagerly
    TILE = "tile"  # more query rows a key-value head than one tile holds repeat the attention's work


@dataclass(frozen=True, kw_only=True, slots=True)
class CostParameters:
    """What the roofline does not know. All are >= 0; 0 where an ideal stack has no such cost."""

    bandwidth_efficiency: float  # of the peak, reached by weights and key-value reads
    compute_efficiency: float  # of the dense peak
    host_s: float  # an iteration: scheduling, launches, sampling
    host_per_token_s: float  # each token of the batch, drafts included
    speculation_s: float  # a speculative iteration, whatever k: rejection sampler, the proposer's inputs
    draft_pass_s: float  # each of the k draft passes, beyond its roofline
    attention_per_draft_token: float  # cost of attention that each draft token adds, as a fraction of one query's
    ngram_s_per_token: float  # an n-gram look-up, each token of context that it scans
    eager_s_per_layer: float  # regime `captured`: an iteration outside the captured sizes
    tile_factor: float  # regime `tile`: cost of each full tile beyond the first, as a fraction of the first's


NAMES: tuple[str, ...] = tuple(field.name for field in fields(CostParameters))
_OF_REGIME = {"eager_s_per_layer": Regime.CAPTURED, "tile_factor": Regime.TILE}

IDEAL = CostParameters(**{name: 1.0 if name.endswith("_efficiency") else 0.0 for name in NAMES})
"""A stack without overhead: the roofline alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior(Checked, path="prior"):
    """A log-normal belief."""

    median: PositiveFloat
    log_sd: PositiveFloat
    source: str


@cache
def load_belief(section_name: str, name: str) -> Prior:
    """The entry `name` of the section `section_name` of configs/sim/cluster.yaml."""
    entries = section("cluster", section_name)
    require(name in entries, f"cluster.{section_name}", "must be a known entry", name, f"known: {', '.join(entries)}")
    return from_mapping(Prior, entries[name], f"cluster.{section_name}.{name}")


def names_of(regime: Regime, *, ngram: bool) -> tuple[str, ...]:
    """Cost parameters that a structural variant fits; n-gram's own only where n-gram runs are among the data."""
    used = [name for name in NAMES if _OF_REGIME.get(name, regime) is regime]
    return tuple(name for name in used if ngram or name != "ngram_s_per_token")


def believed(regime: Regime, priors: Mapping[str, Prior]) -> CostParameters:
    """A structural variant's parameters where nothing was fitted: those of the other variants are 0."""
    of_regime = {name: _OF_REGIME.get(name, regime) is regime for name in NAMES}
    return CostParameters(**{name: priors[name].median if used else 0.0 for name, used in of_regime.items()})


def load_priors(target: str) -> dict[str, Prior]:
    """Beliefs about cost parameters for a kind of target, `gpu` or `cpu`."""
    sections = section("priors", target)
    priors = {name: from_mapping(Prior, values, f"priors.{name}") for name, values in sections.items()}
    require(set(priors) == set(NAMES), f"priors.{target}", "must hold every cost parameter", sorted(priors))
    return priors
