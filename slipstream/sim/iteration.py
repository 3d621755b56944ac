"""Seconds of one decode iteration, and of a whole rollout, by roofline plus what the roofline does not know.

Legend: `S` spans of a trace (any broadcastable shape), `n` = batch x (k + 1) tokens of an iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require
from slipstream.sim.hardware import BYTES, Hardware, Precision
from slipstream.sim.kernels import GemmTable
from slipstream.sim.models import ModelShape
from slipstream.sim.parameters import CostParameters, Regime
from slipstream.sim.rollout import Trace

Array = NDArray[np.float64]

QUERY_TILE = 16
"""Query rows that one tile of a paged-attention kernel holds: an MMA instruction's m16 (PTX ISA, `mma.sync`)."""

TILE_FIXED_SHARE = 0.5
"""Assumed share of a tile's cost that it has however few rows it holds (keys read again); the rest grows with them."""

CAPTURED_TOKENS = 512
"""Largest CUDA graph that vLLM captures by default (vllm.config, `max_cudagraph_capture_size`; 1,024 on data-centre
Blackwell from 0.32 on, which the measured runs are older than)."""

COLLECTIVE_S = 10e-6
"""Assumed latency of one all-reduce inside an NVLink domain; two a layer with tensor parallelism."""


class Drafting(StrEnum):
    """Who proposes tokens."""

    NONE = "none"
    EAGLE3 = "eagle3"
    NGRAM = "ngram"


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One replica of the policy and how it serves."""

    model: ModelShape
    hardware: Hardware
    num_gpus: int = 1  # share weights, heads and experts
    precision: Precision = Precision.BFLOAT16
    captured_tokens: int = CAPTURED_TOKENS
    gemms: GemmTable | None = None  # None: roofline

    def __post_init__(self) -> None:
        require(self.num_gpus >= 1, "engine.num_gpus", "must be >= 1", self.num_gpus)
        needed = self.model.total_parameters * BYTES[self.precision]
        require(
            needed <= self.num_gpus * self.hardware.memory_bytes,
            "engine.num_gpus",
            f"must hold {needed / 1e9:.0f} GB of weights at {self.hardware.memory_bytes / 1e9:.0f} GB a GPU",
            self.num_gpus,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class IterationCost:
    """Seconds of one iteration, by cause."""

    weights_s: Array
    attention_s: Array
    draft_s: Array
    host_s: Array
    regime_s: Array

    @property
    def total_s(self) -> Array:
        """All causes together: they run one after another."""
        return self.weights_s + self.attention_s + self.draft_s + self.host_s + self.regime_s


def iteration_cost(
    engine: Engine,
    parameters: CostParameters,
    *,
    batch_S: Array,
    context_S: Array,
    k: int,
    regime: Regime,
    drafting: Drafting = Drafting.EAGLE3,
) -> IterationCost:
    """Cost of verifying `k` draft tokens for each of `batch_S` sequences with `context_S` cached tokens together.

    Weights: the larger of reading what n tokens need (experts: those that n tokens hit) and of multiplying it; with
    `engine.gemms` as measured, but for experts.
    Attention: the larger of reading keys and values once and of its flops, times 1 + k x attention_per_draft_token.
    Draft: a fixed cost, and k passes over the batch. Host: an iteration, a token, a collective.
    """
    tokens_S = batch_S * (k + 1)
    read_s = BYTES[engine.precision] / (_memory(engine) * parameters.bandwidth_efficiency)
    flop_s = 1.0 / (_flops(engine) * parameters.compute_efficiency)
    model = engine.model
    weights_S = _weights(engine, tokens_S, read_s=read_s, flop_s=flop_s)
    read_S = context_S * model.key_value_elements() * read_s
    multiplied_S = context_S * (k + 1) * model.attention_flops() * flop_s
    attention_S = np.maximum(read_S * (1.0 + k * parameters.attention_per_draft_token), multiplied_S)
    return IterationCost(
        weights_s=weights_S,
        attention_s=attention_S,
        draft_s=_draft(engine, parameters, batch_S, context_S, k, drafting, read_s=read_s, flop_s=flop_s),
        host_s=parameters.host_s + parameters.host_per_token_s * tokens_S + _collectives(engine, tokens_S),
        regime_s=_regime(engine, parameters, tokens_S, read_S, k, regime),
    )


def span_seconds(
    trace: Trace,
    engine: Engine,
    parameters: CostParameters,
    *,
    k: int,
    tokens_per_iteration: float,
    regime: Regime,
    drafting: Drafting = Drafting.EAGLE3,
) -> Array:
    """Seconds of each span [S] of `trace` when an iteration gives each sequence `tokens_per_iteration` tokens."""
    cost = iteration_cost(
        engine,
        parameters,
        batch_S=trace.batch_S,
        context_S=trace.context_S,
        k=k,
        regime=regime,
        drafting=drafting if k else Drafting.NONE,
    )
    return trace.tokens_S * cost.total_s / tokens_per_iteration


def generation_s(
    trace: Trace,
    engine: Engine,
    parameters: CostParameters,
    *,
    k: int,
    tokens_per_iteration: float,
    regime: Regime,
    drafting: Drafting = Drafting.EAGLE3,
) -> float:
    """Seconds of the whole rollout `trace`; see `span_seconds`."""
    spans = span_seconds(
        trace,
        engine,
        parameters,
        k=k,
        tokens_per_iteration=tokens_per_iteration,
        regime=regime,
        drafting=drafting,
    )
    return float(spans.sum())


def _weights(engine: Engine, tokens_S: Array, *, read_s: float, flop_s: float) -> Array:
    model = engine.model
    if engine.gemms is None:
        return np.maximum(
            model.parameters_read(tokens_S) * read_s, 2.0 * model.parameters_per_token * tokens_S * flop_s
        )
    shared_S = np.zeros_like(tokens_S)
    for count, outputs, inputs in model.matrices(engine.num_gpus):
        shared_S = shared_S + count * engine.gemms.seconds_of(tokens_S, outputs=outputs, inputs=inputs)
    experts_per_token = model.num_experts_per_token * model.expert_parameters
    experts_S = np.maximum(
        model.active_experts(tokens_S) * model.expert_parameters * read_s, 2.0 * experts_per_token * tokens_S * flop_s
    )
    return shared_S + experts_S


def _draft(
    engine: Engine,
    parameters: CostParameters,
    batch_S: Array,
    context_S: Array,
    k: int,
    drafting: Drafting,
    *,
    read_s: float,
    flop_s: float,
) -> Array:
    if k == 0 or drafting is Drafting.NONE:
        return np.zeros_like(batch_S)
    if drafting is Drafting.NGRAM:
        return parameters.speculation_s + parameters.ngram_s_per_token * context_S
    size = engine.model.draft_parameters
    one_pass = np.maximum(size * read_s, 2.0 * size * batch_S * flop_s)
    keys = context_S * engine.model.key_value_elements() / engine.model.num_layers * read_s
    return parameters.speculation_s + k * (one_pass + keys + parameters.draft_pass_s)


def _regime(
    engine: Engine, parameters: CostParameters, tokens_S: Array, attention_S: Array, k: int, regime: Regime
) -> Array:
    if regime is Regime.CAPTURED:
        eager_s = parameters.eager_s_per_layer * engine.model.num_layers
        return np.where(tokens_S > engine.captured_tokens, eager_s, 0.0)
    if regime is Regime.TILE:
        rows = (k + 1) * engine.model.queries_per_group
        first = -(-engine.model.queries_per_group // QUERY_TILE)  # autoregressive decode has these anyway
        begun, filled = -(-rows // QUERY_TILE) - first, max(0.0, rows / QUERY_TILE - first)
        tiles = TILE_FIXED_SHARE * begun + (1.0 - TILE_FIXED_SHARE) * filled
        return parameters.tile_factor * tiles * attention_S
    return np.zeros_like(tokens_S)


def _collectives(engine: Engine, tokens_S: Array) -> Array:
    """Two all-reduces a layer over the engine's GPUs: latency, and the ring's bytes on the links."""
    if engine.num_gpus == 1:
        return np.zeros_like(tokens_S)
    share = 2.0 * (engine.num_gpus - 1) / engine.num_gpus
    bytes_S = share * tokens_S * engine.model.hidden_size * BYTES[Precision.BFLOAT16]
    return 2.0 * engine.model.num_layers * (COLLECTIVE_S + bytes_S / engine.hardware.link_bytes_per_s)


def _memory(engine: Engine) -> float:
    return engine.num_gpus * engine.hardware.memory_bytes_per_s


def _flops(engine: Engine) -> float:
    return engine.num_gpus * engine.hardware.flops_per_s[engine.precision]
