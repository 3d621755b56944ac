"""Shapes of policies and drafts, and the bytes and flops that follow from them.

Legend: `n` tokens of one forward pass. Embedding look-ups cost nothing; the output head is a matrix like the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from slipstream.config import require
from slipstream.simulator.cost import Array
from slipstream.simulator.cost.data_files import load


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention, dense or mixture-of-experts, and its one-layer draft."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key-value heads
    head_dim: int
    vocab_size: int
    dense_ffn_hidden_size: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    draft_ffn_hidden_size: int
    draft_vocab_size: int
    source: str
    draft_source: str

    def __post_init__(self) -> None:
        dense, sparse = self.dense_ffn_hidden_size > 0, self.num_experts > 0
        require(dense != sparse, f"model {self.name}", "must be either dense or a mixture of experts", (dense, sparse))
        heads, groups = self.num_attention_heads, self.num_query_groups
        rule = f"must divide num_attention_heads {heads}"
        require(heads % groups == 0, f"model {self.name}.num_query_groups", rule, groups)
        active, rule = self.num_experts_per_token, f"must lie in [0, num_experts {self.num_experts}]"
        require(0 <= active <= self.num_experts, f"model {self.name}.num_experts_per_token", rule, active)

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def shared_parameters(self) -> float:
        """Parameters that every token reads: attention, dense feed-forward, output head."""
        return self.num_layers * (self._attention() + self._ffn(self.dense_ffn_hidden_size)) + self._head()

    @property
    def expert_parameters(self) -> float:
        """Parameters of one expert, over all layers."""
        return self.num_layers * self._ffn(self.expert_ffn_hidden_size)

    @property
    def parameters_per_token(self) -> float:
        """Parameters that take part in one token's forward pass."""
        return self.shared_parameters + self.num_experts_per_token * self.expert_parameters

    @property
    def total_parameters(self) -> float:
        """All parameters, with the input embedding."""
        return self.shared_parameters + self.num_experts * self.expert_parameters + self._head()

    @property
    def draft_parameters(self) -> float:
        """Parameters that one draft pass reads: fused features, one layer (twice as wide an input), output head.

        Source: EAGLE-3, arXiv 2503.01840, section 3.
        """
        fused = 3 * self.hidden_size**2
        extra_input = self.hidden_size * self.head_dim * (self.num_attention_heads + 2 * self.num_query_groups)
        layer = self._attention() + extra_input + self._ffn(self.draft_ffn_hidden_size)
        return fused + layer + self.hidden_size * self.draft_vocab_size

    def key_value_elements(self) -> float:
        """Elements of the key-value cache a token of context."""
        return 2.0 * self.num_layers * self.num_query_groups * self.head_dim

    def attention_flops(self) -> float:
        """Flops of attention for one query token over one token of context: scores and values."""
        return 4.0 * self.num_layers * self.num_attention_heads * self.head_dim

    def active_experts(self, tokens: Array) -> Array:
        """Expected number of distinct experts that `tokens` tokens hit, if the router were uniform.

        Source: E (1 - (1 - m / E)^n) for m of E experts a token, drawn independently.
        """
        if not self.num_experts:
            return np.zeros_like(tokens)
        missed = 1.0 - self.num_experts_per_token / self.num_experts
        return self.num_experts * (1.0 - missed**tokens)

    def parameters_read(self, tokens: Array) -> Array:
        """Parameters that a forward pass over `tokens` tokens brings in from memory."""
        return self.shared_parameters + self.active_experts(tokens) * self.expert_parameters

    def _attention(self) -> float:
        return float(self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_query_groups))

    def _ffn(self, width: int) -> float:
        return 3.0 * self.hidden_size * width

    def _head(self) -> float:
        return float(self.vocab_size * self.hidden_size)


@cache
def load_model(name: str) -> ModelShape:
    """The section `name` of configs/sim/models.yaml; refuses what `load` refuses."""
    return load(ModelShape, "models", name)
