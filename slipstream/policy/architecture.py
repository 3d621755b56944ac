"""Shape of a Qwen3 model, dense or a mixture of experts, and its Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import ConfigError, require
from slipstream.policy.config import ScratchConfig
from slipstream.policy.experts import Experts
from slipstream.types import Dtype

QWEN3 = "Qwen3ForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that determines the parameters' shapes and the forward pass."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int  # key-value heads
    head_dim: int
    ffn_hidden_size: int
    max_position_embeddings: int
    rope_theta: float
    norm_eps: float
    tie_word_embeddings: bool
    eos_token_id: int
    experts: Experts | None = None  # None of a dense model

    @classmethod
    def from_scratch(cls, scratch: ScratchConfig, *, vocab_size: int, eos_token_id: int) -> Architecture:
        """The architecture that a `ScratchConfig` describes, over a tokenizer's vocabulary."""
        return cls(
            vocab_size=vocab_size,
            hidden_size=scratch.hidden_size,
            num_layers=scratch.num_layers,
            num_attention_heads=scratch.num_attention_heads,
            num_query_groups=scratch.num_query_groups,
            head_dim=scratch.head_dim,
            ffn_hidden_size=scratch.ffn_hidden_size,
            max_position_embeddings=scratch.max_position_embeddings,
            rope_theta=scratch.rope_theta,
            norm_eps=1e-6,
            tie_word_embeddings=scratch.tie_word_embeddings,
            eos_token_id=eos_token_id,
        )

    @classmethod
    def from_hf(cls, path: Path) -> Architecture:
        """Read `config.json` of a model directory in Hugging Face format.

        Raises:
            ConfigError: another architecture than Qwen3 or Qwen3-MoE, or a feature of it that the learner lacks.
        """
        config = json.loads((path / "config.json").read_text())
        architectures = config.get("architectures")
        known = architectures in ([QWEN3], [QWEN3_MOE])
        require(known, "policy.model", f"must be a {QWEN3} or a {QWEN3_MOE}", architectures, f"see {path}")
        require(not config.get("attention_bias"), "policy.model", "must have no attention bias", True, f"see {path}")
        require(not config.get("use_sliding_window"), "policy.model", "must use full attention", "sliding window")
        eos = config["eos_token_id"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_query_groups=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            ffn_hidden_size=config["intermediate_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rope_theta=_rope_theta(config),
            norm_eps=config["rms_norm_eps"],
            tie_word_embeddings=config["tie_word_embeddings"],
            eos_token_id=eos[0] if isinstance(eos, list) else eos,
            experts=Experts.from_hf(config) if architectures == [QWEN3_MOE] else None,
        )

    @property
    def name(self) -> str:
        """As transformers and vLLM call it."""
        return QWEN3 if self.experts is None else QWEN3_MOE

    def has_experts(self, layer: int) -> bool:
        """Whether a layer routes tokens to experts."""
        return self.experts is not None and self.experts.are_in(layer)

    def to_hf(self, dtype: Dtype) -> dict[str, Any]:
        """The `config.json` that transformers and vLLM read as this architecture."""
        return {
            "architectures": [self.name],
            "model_type": "qwen3" if self.experts is None else "qwen3_moe",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_query_groups,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_hidden_size,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            # transformers 5 reads rope_parameters; everything older reads rope_theta.
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "eos_token_id": self.eos_token_id,
            "dtype": dtype.value,
            "torch_dtype": dtype.value,
            **({} if self.experts is None else self.experts.to_hf()),
        }

    def num_parameters(self) -> int:
        """Parameters of the model, a tied embedding counted once."""
        heads = (2 * self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim
        every_layer = self.hidden_size * (heads + 2) + 2 * self.head_dim
        dense = 3 * self.hidden_size * self.ffn_hidden_size
        sparse = 0 if self.experts is None else self.experts.num_parameters(self.hidden_size)
        networks = sum(sparse if self.has_experts(layer) else dense for layer in range(self.num_layers))
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * every_layer + networks + embeddings + self.hidden_size


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(kind == "default", "policy.model", "must use plain RoPE", kind, "remove rope_scaling from its config.json")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConfigError("policy.model has no rope_theta in its config.json")
    return float(theta)
