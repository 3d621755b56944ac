"""Inputs of the cost model: its free parameters with their priors, and layouts of runs (configs/sim/settings.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache

from slipstream.catalog import BYTES, Hardware, ModelShape, Precision, load, load_hardware, load_model, section
from slipstream.config import from_mapping, require
from slipstream.simulator.rollout import Lengths, RolloutShape, Slots, lengths_with_mean


class Regime(StrEnum):
    """Explanations of the jump in cost between short and long drafts: the structural variants of the model."""

    SMOOTH = "smooth"  # there is none
    CAPTURED = "captured"  # more tokens than the largest captured CUDA graph run eagerly
    TILE = "tile"  # more query rows a key-value head than one tile holds repeat the attention's work


@dataclass(frozen=True, kw_only=True, slots=True)
class CostParameters:
    """Free parameters, which the roofline does not know. All are >= 0; 0 where an ideal stack has no such cost."""

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
class Prior:
    """A log-normal belief."""

    median: float
    log_sd: float
    source: str

    def __post_init__(self) -> None:
        require(self.median > 0, "prior.median", "must be > 0", self.median)
        require(self.log_sd > 0, "prior.log_sd", "must be > 0", self.log_sd)


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


_NAMED = ("model", "hardware", "precision", "learner_precision", "sources")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One layout. Tokens are counted without the prompt unless the name says so."""

    model: str
    hardware: str
    precision: Precision
    learner_precision: Precision
    num_gpus: int
    gpus_per_engine: int
    memory_share: float  # of an engine's memory that weights and key-value cache may take
    num_rollouts: int
    group_size: int
    slots: Slots
    prompt_tokens: int
    max_response_tokens: int
    mean_response_tokens: dict[str, float]  # by workload
    length_log_sd: float
    captured_tokens: int
    packed: bool  # the learner's sequences; else each is padded to the longest allowed
    sources: dict[str, str]

    def __post_init__(self) -> None:
        missing = sorted({field.name for field in fields(self)} - set(_NAMED) - set(self.sources))
        require(not missing, "setting.sources", "must name a source of every figure", missing)
        rule = f"must be >= gpus_per_engine {self.gpus_per_engine}"
        require(self.num_gpus >= self.gpus_per_engine, "setting.num_gpus", rule, self.num_gpus)
        require(self.group_size >= 1, "setting.group_size", "must be >= 1", self.group_size)
        require(0 < self.memory_share <= 1, "setting.memory_share", "must lie in (0, 1]", self.memory_share)
        needed, memory = self.model_shape.total_parameters * BYTES[self.precision], self.accelerator.memory_bytes
        rule = f"must hold {needed / 1e9:.0f} GB of weights at {memory / 1e9:.0f} GB a GPU"
        require(needed <= self.gpus_per_engine * memory, "setting.gpus_per_engine", rule, self.gpus_per_engine)

    @property
    def model_shape(self) -> ModelShape:
        """The model's shape."""
        return load_model(self.model)

    @property
    def accelerator(self) -> Hardware:
        """The hardware's peaks."""
        return load_hardware(self.hardware)

    def learner_tokens(self, mean_tokens: float) -> float:
        """Tokens of one step's batch as the learner sees it, of responses of `mean_tokens` tokens on average."""
        return self.num_rollouts * (self.prompt_tokens + (mean_tokens if self.packed else self.max_response_tokens))

    @property
    def cache_tokens(self) -> float:
        """Tokens whose keys and values an engine holds beside the weights; one where the weights leave no room."""
        width = BYTES[self.precision]
        room = self.memory_share * self.gpus_per_engine * self.accelerator.memory_bytes
        room -= self.model_shape.total_parameters * width
        return max(1.0, room / (self.model_shape.key_value_elements() * width))

    def shape(self, num_gpus: int | None = None) -> RolloutShape:
        """The rollouts, over the engines that `num_gpus` GPUs hold (default: all of them)."""
        gpus = self.num_gpus if num_gpus is None else num_gpus
        engines = max(1, gpus // self.gpus_per_engine)
        # An engine without a response idles; it does not make the others faster.
        return RolloutShape(
            num_rollouts=self.num_rollouts,
            num_engines=min(engines, self.num_rollouts),
            prompt_tokens=float(self.prompt_tokens),
            group_size=self.group_size,
            slots=self.slots,
            cache_tokens=self.cache_tokens,
        )

    def lengths(self, mean_tokens: float) -> Lengths:
        """Responses of `mean_tokens` tokens on average."""
        limit = float(self.max_response_tokens)
        return lengths_with_mean(mean=mean_tokens, log_sd=self.length_log_sd, max_tokens=limit)


def load_setting(name: str) -> Setting:
    """The section `name` of configs/sim/settings.yaml; refuses what `load` refuses."""
    return load(Setting, "settings", name)
