"""Seconds of one decode iteration and of a rollout's spans, by the roofline and fitted costs.

Legend: `S` spans of a trace, `n` = batch x (k + 1) tokens of an iteration. Several k, given as [K, 1], yield rows [K,
    S].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from slipstream.catalog import BYTES, DFLASH_LAYERS, ModelShape, Precision
from slipstream.simulator import Array
from slipstream.simulator.rollout import Trace
from slipstream.simulator.settings import CostParameters, Setting, load_belief

_QUERY_TILE = 16  # query rows of one tile of a paged-attention kernel: an MMA instruction's m16 (PTX ISA, `mma.sync`)
_TILE_FIXED_SHARE = 0.5  # assumed fraction of a tile's cost that does not grow with its rows (keys are read again)
_COLLECTIVE_S = 10e-6  # assumed latency of one all-reduce inside an NVLink domain; tensor parallelism needs two a layer


class Drafting(StrEnum):
    """Proposer of draft tokens."""

    EAGLE3 = "eagle3"  # k passes of one layer
    DFLASH = "dflash"  # one pass of several layers over k + 1 tokens a sequence
    NGRAM = "ngram"


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Cost model of one engine of a layout."""

    setting: Setting
    parameters: CostParameters
    network_collective_s: float = field(default_factory=lambda: load_belief("links", "network_collective_s").median)

    def span_s(
        self, trace: Trace, *, k: int | Array, tokens_per_iteration: float | Array, drafting: Drafting = Drafting.EAGLE3
    ) -> Array:
        """Compute the seconds of each span [S] if an iteration gives each sequence `tokens_per_iteration` tokens."""
        costs = self.iteration(batch_S=trace.batch_S, context_S=trace.context_S, k=k, drafting=drafting)
        return trace.tokens_S * sum(costs.values()) / tokens_per_iteration

    def iteration(
        self, *, batch_S: Array, context_S: Array, k: int | Array, drafting: Drafting = Drafting.EAGLE3
    ) -> dict[str, Array]:
        """Compute the cost of verifying `k` draft tokens for each of `batch_S` sequences, as docs/simulator.md has it.

        Args:
            context_S: cached tokens, summed over the sequences.
        Returns:
            Seconds [S] by cause; the causes run one after another.
        """
        model, parameters = self.setting.model_shape, self.parameters
        tokens_S = batch_S * (k + 1)
        used_S = model.shared_parameters + active_experts(model, tokens_S) * model.expert_parameters
        multiplied_S = 2.0 * model.parameters_per_token * tokens_S * self._flop_s
        read_S = context_S * model.key_value_elements() * self._read_s
        attended_S = context_S * (k + 1) * model.attention_flops() * self._flop_s
        return {
            "weights": np.maximum(used_S * self._read_s, multiplied_S),
            "attention": np.maximum(read_S * (1.0 + k * parameters.attention_per_draft_token), attended_S),
            "draft": self._draft(batch_S, context_S, k, drafting),
            "host": parameters.host_s + parameters.host_per_token_s * tokens_S + self._collectives(tokens_S),
            "regime": self._regime(tokens_S, read_S, k),
        }

    @property
    def _read_s(self) -> float:
        """Seconds to read one element of weights, keys or values."""
        memory = self.setting.gpus_per_engine * self.setting.accelerator.memory_bytes_per_s
        return BYTES[self.setting.precision] / (memory * self.parameters.bandwidth_efficiency)

    @property
    def _flop_s(self) -> float:
        flops = self.setting.gpus_per_engine * self.setting.accelerator.flops_per_s[self.setting.precision]
        return 1.0 / (flops * self.parameters.compute_efficiency)

    def _draft(self, batch_S: Array, context_S: Array, k: int | Array, drafting: Drafting) -> Array:
        model, parameters = self.setting.model_shape, self.parameters
        if drafting is Drafting.NGRAM:
            return np.where(k > 0, parameters.speculation_s + parameters.ngram_s_per_token * context_S, 0.0)
        size, num_layers, passes, rows_S = model.draft_parameters, 1, k, batch_S
        if drafting is Drafting.DFLASH:
            size, num_layers, passes = model.dflash_parameters, DFLASH_LAYERS, np.ones_like(k)
            rows_S = batch_S * (k + 1)
        weights = np.maximum(size * self._read_s, 2.0 * size * rows_S * self._flop_s)
        keys = context_S * model.key_value_elements() / model.num_layers * self._read_s
        one_pass = weights + num_layers * (keys + parameters.draft_pass_s)
        return np.where(k > 0, parameters.speculation_s + passes * one_pass, 0.0)

    def _regime(self, tokens_S: Array, read_S: Array, k: int | Array) -> Array:
        """Compute the seconds that jump with k; a structural variant has only its own parameter above 0."""
        model, parameters = self.setting.model_shape, self.parameters
        eager_s = parameters.eager_s_per_layer * model.num_layers
        rows = (k + 1) * model.queries_per_group
        first = -(-model.queries_per_group // _QUERY_TILE)  # tiles of autoregressive decoding
        begun, filled = -(-rows // _QUERY_TILE) - first, np.maximum(0.0, rows / _QUERY_TILE - first)
        tiles = parameters.tile_factor * (_TILE_FIXED_SHARE * begun + (1.0 - _TILE_FIXED_SHARE) * filled)
        return np.where(tokens_S > self.setting.captured_tokens, eager_s, 0.0) + tiles * read_S

    def _collectives(self, tokens_S: Array) -> Array:
        """Compute the seconds of two all-reduces a layer over an engine's GPUs: latency plus bytes over bandwidth.

        An engine that spans NVLink domains reduces inside each domain, then each GPU its part between the domains.
        """
        num_gpus, model, hardware = self.setting.gpus_per_engine, self.setting.model_shape, self.setting.accelerator
        if num_gpus == 1:
            return np.zeros_like(tokens_S)
        bytes_S = tokens_S * model.hidden_size * BYTES[Precision.BFLOAT16]
        inside = min(num_gpus, hardware.domain_gpus)
        one_S = np.zeros_like(tokens_S)
        if inside > 1:
            one_S = _COLLECTIVE_S + _ring_share(inside) * bytes_S / hardware.link_bytes_per_s
        domains = -(-num_gpus // inside)
        if domains > 1:
            network_S = _ring_share(domains) * bytes_S / (inside * hardware.network_bytes_per_s)
            one_S = one_S + self.network_collective_s + network_S
        return 2.0 * model.num_layers * one_S


def active_experts(model: ModelShape, tokens: Array) -> Array:
    """Compute the expected number of distinct experts that `tokens` tokens hit under a uniform router.

    Source: E (1 - (1 - m / E)^n) for m of E experts a token, chosen independently.
    """
    if not model.num_experts:
        return np.zeros_like(tokens)
    missed = 1.0 - model.num_experts_per_token / model.num_experts
    return model.num_experts * (1.0 - missed**tokens)


def _ring_share(num: int) -> float:
    """Return the fraction of an array's bytes that each of `num` members of a ring all-reduce sends."""
    return 2.0 * (num - 1) / num
