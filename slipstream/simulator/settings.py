"""Inputs of the cost model: free parameters, priors, and layouts of runs (configs/sim/)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache

from slipstream.catalog import BYTES, Hardware, ModelShape, Precision, load, load_hardware, load_model, section
from slipstream.config import PositiveFloat, PositiveInt, Rate, from_mapping, require
from slipstream.simulator.rollout import Lengths, RolloutShape, Slots, lengths_with_mean


class Regime(StrEnum):
    """Explanations of the jump in cost between short and long drafts: the structural variants of the model."""

    SMOOTH = "smooth"  # no jump
    CAPTURED = "captured"  # an iteration with more tokens than the largest captured CUDA graph runs eagerly
    TILE = "tile"  # more query rows a key-value head than one tile holds repeat the attention's work


@dataclass(frozen=True, kw_only=True, slots=True)
class CostParameters:
    """Costs outside the roofline, fitted to measurements. All are >= 0; an ideal stack has a cost of 0."""

    bandwidth_efficiency: float  # fraction of the peak bandwidth that reads of weights and keys and values reach
    compute_efficiency: float  # fraction of the dense peak
    host_s: float  # a fixed cost of every iteration: scheduling, launches, sampling
    host_per_token_s: float  # a cost of each token of the batch, drafts included
    speculation_s: float  # a fixed cost of a speculative iteration: rejection sampler, the proposer's inputs
    draft_pass_s: float  # a cost of each of the k draft passes beyond the roofline
    attention_per_draft_token: float  # cost of attention for each draft token, as a fraction of one query's cost
    ngram_s_per_token: float  # cost of an n-gram look-up for each token of context
    eager_s_per_layer: float  # regime `captured`: cost of an iteration outside the captured sizes
    tile_factor: float  # regime `tile`: cost of each full tile beyond the first, as a fraction of the first tile's


NAMES: tuple[str, ...] = tuple(field.name for field in fields(CostParameters))
OF_REGIME = {"eager_s_per_layer": Regime.CAPTURED, "tile_factor": Regime.TILE}
"""Cost parameters of a single structural variant; they are 0 in the others."""

IDEAL = CostParameters(**{name: 1.0 if name.endswith("_efficiency") else 0.0 for name in NAMES})
"""Parameters of a stack without overhead, which runs at the roofline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """Log-normal prior of a parameter, with its source."""

    median: PositiveFloat
    log_sd: PositiveFloat
    source: str


@cache
def load_belief(section_name: str, name: str) -> Prior:
    """Load an entry of configs/sim/cluster.yaml."""
    entries = section("cluster", section_name)
    require(name in entries, f"cluster.{section_name}", "must be a known entry", name, f"known: {', '.join(entries)}")
    return from_mapping(Prior, entries[name], f"cluster.{section_name}.{name}")


def load_priors(target: str) -> dict[str, Prior]:
    """Load the priors of all cost parameters for a kind of target, `gpu` or `cpu`."""
    sections = section("priors", target)
    priors = {name: from_mapping(Prior, values, f"priors.{name}") for name, values in sections.items()}
    require(set(priors) == set(NAMES), f"priors.{target}", "must hold every cost parameter", sorted(priors))
    return priors


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Layout of a run. Token counts exclude the prompt unless the field's name says otherwise."""

    model: str
    hardware: str
    precision: Precision
    learner_precision: Precision
    num_gpus: int
    gpus_per_engine: int
    memory_share: Rate  # fraction of an engine's memory for weights and key-value cache
    num_rollouts: int
    group_size: PositiveInt
    slots: Slots
    prompt_tokens: int
    max_response_tokens: int
    mean_response_tokens: dict[str, float]  # by workload
    length_log_sd: float
    captured_tokens: int
    packed: bool  # the learner packs sequences; otherwise each is padded to `max_response_tokens`
    sources: dict[str, str]

    def __post_init__(self) -> None:
        named = {"model", "hardware", "precision", "learner_precision", "sources"}
        missing = sorted({field.name for field in fields(self)} - named - set(self.sources))
        require(not missing, "setting.sources", "must name a source of every figure", missing)
        rule = f"must be >= gpus_per_engine {self.gpus_per_engine}"
        require(self.num_gpus >= self.gpus_per_engine, "setting.num_gpus", rule, self.num_gpus)
        needed, memory = self.model_shape.total_parameters * BYTES[self.precision], self.accelerator.memory_bytes
        rule = f"must hold {needed / 1e9:.0f} GB of weights at {memory / 1e9:.0f} GB a GPU"
        require(needed <= self.gpus_per_engine * memory, "setting.gpus_per_engine", rule, self.gpus_per_engine)

    @property
    def model_shape(self) -> ModelShape:
        """Shape of the model."""
        return load_model(self.model)

    @property
    def accelerator(self) -> Hardware:
        """Peak figures of the hardware."""
        return load_hardware(self.hardware)

    def learner_tokens(self, mean_tokens: float) -> float:
        """Count the tokens of one step's batch in the learner, for responses of `mean_tokens` tokens on average."""
        return self.num_rollouts * (self.prompt_tokens + (mean_tokens if self.packed else self.max_response_tokens))

    @property
    def cache_tokens(self) -> float:
        """Number of tokens whose keys and values fit beside an engine's weights; at least one."""
        width = BYTES[self.precision]
        room = self.memory_share * self.gpus_per_engine * self.accelerator.memory_bytes
        room -= self.model_shape.total_parameters * width
        return max(1.0, room / (self.model_shape.key_value_elements() * width))

    def shape(self, num_gpus: int | None = None) -> RolloutShape:
        """Distribute a step's rollouts over the engines of `num_gpus` GPUs; None uses all GPUs."""
        gpus = self.num_gpus if num_gpus is None else num_gpus
        engines = max(1, gpus // self.gpus_per_engine)
        # An engine without a response idles and does not speed up the others.
        return RolloutShape(
            num_rollouts=self.num_rollouts,
            num_engines=min(engines, self.num_rollouts),
            prompt_tokens=float(self.prompt_tokens),
            group_size=self.group_size,
            slots=self.slots,
            cache_tokens=self.cache_tokens,
        )

    def lengths(self, mean_tokens: float) -> Lengths:
        """Return the distribution of response lengths with a mean of `mean_tokens`."""
        limit = float(self.max_response_tokens)
        return lengths_with_mean(mean=mean_tokens, log_sd=self.length_log_sd, max_tokens=limit)


def load_setting(name: str) -> Setting:
    """Load a section of configs/sim/settings.yaml."""
    return load(Setting, "settings", name)
