"""Architecture of a dense Qwen3, a Qwen3-MoE or a MiMo, read from and written to a Hugging Face config.json.

Source of the experts: transformers 5, `models/qwen3_moe/modeling_qwen3_moe.py`; vLLM 0.32,
`model_executor/models/qwen3_moe.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.catalog import ModelShape
from slipstream.config import ConfigError, require
from slipstream.learner.config import LoraConfig, LoraTarget, ParallelConfig, ScratchConfig
from slipstream.types import Dtype

QWEN3 = "Qwen3ForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"
MIMO = "MiMoForCausalLM"
_MODEL_TYPES = {QWEN3: "qwen3", QWEN3_MOE: "qwen3_moe", MIMO: "qwen2"}  # MiMo's trunk is a Qwen2, which vLLM reads
_HF_NAMES = {  # sizes that an `Architecture` and a `ScratchConfig` share, with their names in a `config.json`
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Feed-forward networks of a mixture of experts, where a router sends each token to a few of many."""

    num_experts: int
    num_experts_per_token: int
    ffn_hidden_size: int  # width of one expert
    normalizes_chosen: bool  # True: the weights of a token's experts sum to 1; False: those of all experts sum to 1
    dense_layers: tuple[int, ...] = ()  # layers with a single network of the model's `ffn_hidden_size`

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Experts:
        """Read the experts of a Qwen3-MoE's `config.json`.

        Raises:
            ConfigError: the router would get no gradient, or no layer has experts.
        """
        num_layers, every = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
        named_dense = config.get("mlp_only_layers") or []
        dense = tuple(layer for layer in range(num_layers) if layer in named_dense or (layer + 1) % every)
        require(len(dense) < num_layers, "policy.model", "must have a layer with experts", dense, "all these are dense")
        chosen, normalizes = config["num_experts_per_tok"], config["norm_topk_prob"]
        require(
            chosen > 1 or not normalizes,
            "policy.model",
            "must choose several experts a token, or not normalize their weights (norm_topk_prob)",
            chosen,
            "the weight of one is always 1, and its router would learn nothing",
        )
        return cls(
            # transformers 5 writes the second name; everything older, and vLLM, the first.
            num_experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
            num_experts_per_token=chosen,
            ffn_hidden_size=config["moe_intermediate_size"],
            normalizes_chosen=normalizes,
            dense_layers=dense,
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the experts' entries of a `config.json`."""
        return {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_token,
            "moe_intermediate_size": self.ffn_hidden_size,
            "norm_topk_prob": self.normalizes_chosen,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(self.dense_layers),
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,  # reinforcement learning has no loss that balances experts
        }


def require_even_experts(experts: Experts | None, parallel: ParallelConfig) -> None:
    """Check `learner.parallel` against the policy's experts.

    Raises:
        ConfigError: a dense policy has `expert` above 1, the experts do not divide, or experts meet tensor parallelism.
    """
    if experts is None:
        rule = "must be 1 for a policy without experts"
        require(parallel.expert == 1, "learner.parallel.expert", rule, parallel.expert)
        return
    rule = f"must divide the policy's {experts.num_experts} experts"
    require(experts.num_experts % parallel.expert == 0, "learner.parallel.expert", rule, parallel.expert)
    require(
        parallel.tensor == 1,
        "learner.parallel.tensor",
        "must be 1 for a mixture of experts",
        parallel.tensor,
        "deal the experts to data-parallel ranks with learner.parallel.expert instead",
    )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and settings that determine the parameters' shapes and the forward pass.

    A model with an MTP layer, which predicts the token after the next, is a MiMo. A MiMo's attention is that of Qwen2,
    with biases on queries, keys and values, and without norms on queries and keys.
    """

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
    experts: Experts | None = None  # None: the model is dense
    num_mtp_layers: int = 0  # 1 in a MiMo

    @classmethod
    def from_scratch(cls, scratch: ScratchConfig, *, vocab_size: int, eos_token_id: int) -> Architecture:
        """Combine the sizes of a `ScratchConfig` with a tokenizer's vocabulary."""
        sizes = {name: getattr(scratch, name) for name in (*_HF_NAMES, "head_dim", "num_mtp_layers")}
        return cls(vocab_size=vocab_size, eos_token_id=eos_token_id, rope_theta=10_000.0, norm_eps=1e-6, **sizes)

    @classmethod
    def from_hf(cls, path: Path) -> Architecture:
        """Read `config.json` of a model directory in Hugging Face format.

        Raises:
            ConfigError: the architecture is none of Qwen3, Qwen3-MoE and MiMo, or has a feature that the learner lacks.
        """
        config = json.loads((path / "config.json").read_text())
        architectures = config.get("architectures")
        known = architectures in ([QWEN3], [QWEN3_MOE], [MIMO])
        rule = f"must be a {QWEN3}, a {QWEN3_MOE} or a {MIMO}"
        require(known, "policy.model", rule, architectures, f"see {path}")
        is_mimo = architectures == [MIMO]
        if is_mimo:
            _require_mimo(config, path)
        else:
            require(
                not config.get("attention_bias"), "policy.model", "must have no attention bias", True, f"see {path}"
            )
        require(not config.get("use_sliding_window"), "policy.model", "must use full attention", "sliding window")
        eos = config["eos_token_id"]
        return cls(
            vocab_size=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            **{name: config[hf_name] for name, hf_name in _HF_NAMES.items()},
            head_dim=config["hidden_size"] // config["num_attention_heads"] if is_mimo else config["head_dim"],
            rope_theta=_rope_theta(config),
            eos_token_id=eos[0] if isinstance(eos, list) else eos,
            experts=Experts.from_hf(config) if architectures == [QWEN3_MOE] else None,
            num_mtp_layers=1 if is_mimo else 0,
        )

    @property
    def name(self) -> str:
        """Class name of the model in transformers and vLLM."""
        if self.has_mtp:
            return MIMO
        return QWEN3 if self.experts is None else QWEN3_MOE

    @property
    def has_mtp(self) -> bool:
        """True if the model has an MTP layer."""
        return self.num_mtp_layers > 0

    @property
    def mtp_layer_ids(self) -> tuple[int, ...]:
        """Layer ids of the hidden states that an MTP layer reads: the residual stream after the last layer."""
        return (self.num_layers,)

    def has_experts(self, layer: int) -> bool:
        """Return True if the layer routes tokens to experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def to_hf(self, dtype: Dtype) -> dict[str, Any]:
        """Return the `config.json` of this architecture for transformers and vLLM."""
        return {
            "architectures": [self.name],
            "model_type": _MODEL_TYPES[self.name],
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            **{hf_name: getattr(self, name) for name, hf_name in _HF_NAMES.items()},
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            # transformers 5 reads rope_parameters; everything older reads rope_theta.
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,
            "attention_bias": self.has_mtp,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "eos_token_id": self.eos_token_id,
            "dtype": dtype.value,
            "torch_dtype": dtype.value,
            **({} if self.experts is None else self.experts.to_hf()),
            **({"num_nextn_predict_layers": self.num_mtp_layers} if self.has_mtp else {}),
        }

    def num_parameters(self) -> int:
        """Count the model's parameters; a tied embedding counts once."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_query_groups * self.head_dim
        matrices = self.hidden_size * 2 * (queries + keys)
        vectors = 2 * self.hidden_size + (queries + 2 * keys if self.has_mtp else 2 * self.head_dim)
        dense = 3 * self.hidden_size * self.ffn_hidden_size
        experts = self.experts  # each with three matrices, and a row of the router
        sparse = experts.num_experts * self.hidden_size * (1 + 3 * experts.ffn_hidden_size) if experts else 0
        networks = sum(sparse if self.has_experts(layer) else dense for layer in range(self.num_layers))
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        # An MTP layer projects two states into one, has three norms, and is otherwise a layer of the trunk.
        mtp = self.num_mtp_layers * (2 * self.hidden_size**2 + 3 * self.hidden_size + matrices + vectors + dense)
        return self.num_layers * (matrices + vectors) + networks + embeddings + self.hidden_size + mtp


Shape = Architecture | ModelShape
"""Sizes of a model that was loaded, or of a published one."""


def _require_mimo(config: Mapping[str, Any], path: Path) -> None:
    """Check that the learner and vLLM read the MiMo's config alike."""
    layers = config.get("num_nextn_predict_layers")
    require(layers == 1, "policy.model", f"a {MIMO} must have num_nextn_predict_layers 1", layers, f"see {path}")
    require(config.get("attention_bias", True), "policy.model", f"a {MIMO} must have attention bias", False)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    rule = f"the head_dim of a {MIMO} must be hidden_size / num_attention_heads = {hidden} / {heads}, as vLLM has it"
    require(dim * heads == hidden, "policy.model", rule, dim, f"see {path}")


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(kind == "default", "policy.model", "must use plain RoPE", kind, "remove rope_scaling from its config.json")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConfigError("policy.model has no rope_theta in its config.json")
    return float(theta)


def require_divisible(shape: Shape, *, tensor: int, pipeline: int) -> None:
    """Check that tensor and pipeline parallelism split the model evenly.

    Query heads need no check of their own, because every key-value head has the same number of them.
    """
    for name, size in (
        ("key-value heads", shape.num_query_groups),
        ("ffn hidden size", shape.ffn_hidden_size),
        ("vocabulary", shape.vocab_size),
    ):
        require(size % tensor == 0, "learner.parallel.tensor", f"must divide the policy's {size} {name}", tensor)
    layers = shape.num_layers
    require(layers % pipeline == 0, "learner.parallel.pipeline", f"must divide the policy's {layers} layers", pipeline)


def require_adaptable(shape: Shape, lora: LoraConfig) -> None:
    """Check `policy.lora` against the policy.

    Raises:
        ConfigError: a target is a matrix of experts, or the rank exceeds a side of a target.
    """
    if isinstance(shape, Architecture) and shape.experts is not None:
        ffn = {LoraTarget.GATE, LoraTarget.UP, LoraTarget.DOWN}
        refused = [target.value for target in lora.targets if target in ffn]
        fix = "name q_proj, k_proj, v_proj and o_proj alone"
        require(not refused, "policy.lora.targets", "must leave out matrices of experts", refused, fix)
    heads, groups = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    inner = {LoraTarget.QUERY: heads, LoraTarget.OUTPUT: heads, LoraTarget.KEY: groups, LoraTarget.VALUE: groups}
    for target in lora.targets:
        side = min(shape.hidden_size, inner.get(target, shape.ffn_hidden_size))
        rule = f"must be at most {side}, the shorter side of {target.value}"
        require(lora.rank <= side, "policy.lora.rank", rule, lora.rank, "the matrix itself has no higher rank")
