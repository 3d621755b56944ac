"""Architecture of a policy, read from and written to a Hugging Face config.json, and the table of known families.

`docs/models.md` says how each family was tested, and what a new one takes.

Source: transformers 5, `models/<model type>/modeling_<model type>.py`; vLLM 0.32, `model_executor/models`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from slipstream.catalog import ModelShape
from slipstream.config import ConfigError, from_mapping, require, to_mapping
from slipstream.data.chat import end_token_ids
from slipstream.learner.config import LoraConfig, LoraTarget, ParallelConfig, RopeConfig, RopeType, ScratchConfig
from slipstream.types import Dtype


@dataclass(frozen=True, kw_only=True)
class Family:
    """A class of transformers and vLLM: one row of `FAMILIES`."""

    name: str  # class name in transformers and vLLM
    model_type: str
    qk_norm: bool = False  # norms on queries and keys
    qkv_bias: bool = False  # biases on queries, keys and values
    divides_hidden: bool = False  # vLLM takes hidden_size / num_attention_heads for the head dimension
    eagle3: bool = True  # vLLM returns the hidden states that an EAGLE-3 draft reads


QWEN3 = Family(name="Qwen3ForCausalLM", model_type="qwen3", qk_norm=True)
QWEN3_MOE = Family(name="Qwen3MoeForCausalLM", model_type="qwen3_moe", qk_norm=True)
# The trunk of a MiMo is a Qwen2, which vLLM reads; vLLM's forward pass of it returns no states of inner layers.
MIMO = Family(name="MiMoForCausalLM", model_type="qwen2", qkv_bias=True, divides_hidden=True, eagle3=False)
QWEN2 = Family(name="Qwen2ForCausalLM", model_type="qwen2", qkv_bias=True, divides_hidden=True)  # and Qwen2.5
LLAMA = Family(name="LlamaForCausalLM", model_type="llama")  # and SmolLM2
MISTRAL = Family(name="MistralForCausalLM", model_type="mistral")
FAMILIES = {family.name: family for family in (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL, MIMO)}

_HF_NAMES = {  # sizes that an `Architecture` and a `ScratchConfig` share, with their names in a `config.json`
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "head_dim": "head_dim",
}
_ALLOWED = {  # the only value that an entry of a `config.json` may have, where it is there and not null
    "hidden_act": "silu",
    "attention_dropout": 0,
    "mlp_bias": False,
    "qkv_bias": False,  # read by vLLM alone
    "qk_norm": False,  # read by vLLM alone
    "is_causal": True,
    "partial_rotary_factor": 1,
    "quantization_config": None,
    "dual_chunk_attention_config": None,
    "llama_4_scaling": None,
}
_ORIGINAL = "original_max_position_embeddings"


def aux_layer_ids(given: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers of a policy that an EAGLE-3 draft reads: the `given` ones, by default those that vLLM takes.

    The rule gives three rising layers from seven layers on; a shallower policy gives its last three.

    Raises:
        ConfigError: the policy lacks one of them.
    Source: `get_eagle3_default_aux_hidden_state_layers` of vLLM 0.32, which is the rule of EAGLE-3's authors.
    """
    last = num_layers - 3
    default = (2, num_layers // 2, last) if num_layers >= 7 else (last, last + 1, last + 2)
    ids = default if given is None else tuple(given)
    rule = f"must be in [0, {num_layers}), the policy's layers"
    require(all(0 <= layer < num_layers for layer in ids), "draft.eagle3.aux_hidden_state_layer_ids", rule, ids)
    return ids


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
        """Read the experts of a Qwen3-MoE's `config.json`, and require that their routers can learn."""
        num_layers, every = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
        named_dense = config.get("mlp_only_layers") or []
        dense = tuple(layer for layer in range(num_layers) if layer in named_dense or (layer + 1) % every)
        require(len(dense) < num_layers, "policy.model", "must have a layer with experts", dense, "all these are dense")
        chosen, normalizes = config["num_experts_per_tok"], config["norm_topk_prob"]
        rule = "must choose several experts a token, or not normalize their weights (norm_topk_prob)"
        fix = "the weight of one is always 1, and its router would learn nothing"
        require(chosen > 1 or not normalizes, "policy.model", rule, chosen, fix)
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


def require_routes(shape: Shape) -> None:
    """Check that the policy has routers, whose routes a learner can replay."""
    is_sparse = shape.experts is not None if isinstance(shape, Architecture) else shape.num_experts > 0
    rule, fix = "must be false for a dense policy", "it has no routers: leave it out"
    require(is_sparse, "grpo.router_replay", rule, True, fix)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Family, sizes and settings, which determine the parameters' shapes and the forward pass."""

    family: Family = QWEN3
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int  # key-value heads
    head_dim: int
    ffn_hidden_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeConfig | None = None  # with every original length given, but for type `linear`, which has none
    norm_eps: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]  # tokens that end a response
    experts: Experts | None = None  # None: the model is dense
    num_mtp_layers: int = 0  # layers that predict the token after the next: 1 in a MiMo

    @classmethod
    def from_scratch(cls, scratch: ScratchConfig, *, vocab_size: int, eos_token_id: int) -> Architecture:
        """Combine the sizes of a `ScratchConfig` with a tokenizer's vocabulary."""
        known = {**vars(scratch.shape), **vars(scratch)}
        sizes = {name: known[name] for name in (*_HF_NAMES, "num_mtp_layers")}
        family = MIMO if scratch.num_mtp_layers else QWEN3
        own = {"family": family, "vocab_size": vocab_size, "eos_token_ids": (eos_token_id,)}
        return cls(**own, rope_theta=10_000.0, norm_eps=1e-6, **sizes)

    @classmethod
    def from_hf(cls, path: Path) -> Architecture:
        """Read `config.json` of a model directory in Hugging Face format.

        Raises:
            ConfigError: the family is none of `FAMILIES`, a size is missing, or the model has a feature that the
                learner does not compute.
        """
        config = json.loads((path / "config.json").read_text())
        name, *others = config.get("architectures") or [""]
        rule, fix = f"must be one of {', '.join(FAMILIES)}", f"see docs/models.md and {path}"
        require(name in FAMILIES and not others, "policy.model", rule, [name, *others], fix)
        family = FAMILIES[name]
        config = {"tie_word_embeddings": False, **config}
        if family is LLAMA or "num_key_value_heads" in config:  # else it is a number of transformers' own
            config["num_key_value_heads"] = config.get("num_key_value_heads") or config.get("num_attention_heads")
        needed = ["vocab_size", "rms_norm_eps", *_HF_NAMES.values()]
        if family is not QWEN3:  # whose own defaults to 128 in transformers, whatever the other sizes
            needed.remove("head_dim")
        missing = [name for name in needed if config.get(name) is None]
        require(not missing, "policy.model", "must name its sizes in config.json", f"no {missing}", f"see {path}")
        config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        _require_computed(config, family, path)
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            **{name: config[hf_name] for name, hf_name in _HF_NAMES.items()},
            rope_theta=_rope_theta(config, family),
            rope_scaling=_rope_scaling(config, path),
            eos_token_ids=end_token_ids(path),
            experts=Experts.from_hf(config) if family is QWEN3_MOE else None,
            num_mtp_layers=1 if family is MIMO else 0,
        )

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
        first, *more = self.eos_token_ids
        return {
            "architectures": [self.family.name],
            "model_type": self.family.model_type,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            **{hf_name: getattr(self, name) for name, hf_name in _HF_NAMES.items()},
            "hidden_act": "silu",
            **self.positions_to_hf(),
            "attention_bias": self.family.qkv_bias,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "initializer_range": 0.02,
            "eos_token_id": [first, *more] if more else first,
            "dtype": dtype.value,
            "torch_dtype": dtype.value,
            **({} if self.experts is None else self.experts.to_hf()),
            **({"num_nextn_predict_layers": self.num_mtp_layers} if self.has_mtp else {}),
        }

    def positions_to_hf(self) -> dict[str, Any]:
        """Return the entries of a `config.json` that say where positions end and what angles they have."""
        scaling: dict[str, Any] | None = None
        if self.rope_scaling is not None:
            given = {name: value for name, value in to_mapping(self.rope_scaling).items() if value is not None}
            scaling = {"rope_type": given.pop("type"), **given}
        return {
            "max_position_embeddings": self.max_position_embeddings,
            # transformers 5 reads rope_parameters; everything older reads rope_theta and rope_scaling.
            "rope_parameters": {"rope_theta": self.rope_theta, **(scaling or {"rope_type": "default"})},
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
        }

    @property
    def num_positions(self) -> int:
        """Tokens of the longest sequence that vLLM serves the model for."""
        return num_positions(self.positions_to_hf())

    def extended(self, rope: RopeConfig | None) -> Architecture:
        """Return the architecture with `policy.rope`, which gives a model without scaling more positions.

        Raises:
            ConfigError: the model has another scaling of its own, more positions than the section reaches, or fewer
                than the section takes for the original ones.
        """
        if rope is None:
            return self
        own, known = self.rope_scaling, self.max_position_embeddings
        if own is not None:
            fix = "leave policy.rope out: the config.json has the scaling that the model was trained with"
            for name, value in to_mapping(rope).items():
                expected = to_mapping(own)[name]
                rule = f"must be the model's own {json.dumps(expected)}"
                require(value is None or value == expected, f"policy.rope.{name}", rule, value, fix)
            return self
        original = rope.original_max_position_embeddings or known
        rule, fix = f"must be <= the policy's {known} positions", "it is the length that the model was trained on"
        require(original <= known, "policy.rope.original_max_position_embeddings", rule, original, fix)
        rule = f"must extend {original} original positions to the policy's {known} at least"
        require(rope.num_positions(known) >= known, "policy.rope.factor", rule, rope.factor, "raise it")
        if rope.type is RopeType.LINEAR:  # vLLM multiplies the positions of this type by the factor itself
            scaling = replace(rope, original_max_position_embeddings=None)
            return replace(self, max_position_embeddings=original, rope_scaling=scaling)
        scaling = replace(rope, original_max_position_embeddings=original)
        return replace(self, max_position_embeddings=rope.num_positions(known), rope_scaling=scaling)

    def num_parameters(self) -> int:
        """Count the model's parameters; a tied embedding counts once."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_query_groups * self.head_dim
        matrices = self.hidden_size * 2 * (queries + keys)
        vectors = 2 * self.hidden_size
        vectors += (queries + 2 * keys) * self.family.qkv_bias + 2 * self.head_dim * self.family.qk_norm
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


def _require_computed(config: Mapping[str, Any], family: Family, path: Path) -> None:
    """Check that learner and vLLM compute all that the config says, and read it alike."""
    where = f"see {path}"
    for name, allowed in (_ALLOWED | {"attention_bias": family.qkv_bias}).items():
        value = config.get(name)
        rule = f"must have {name} {json.dumps(allowed)} as a {family.name}"
        require(value is None or value == allowed, "policy.model", rule, value, where)
    window = config.get("use_sliding_window")
    if family in (LLAMA, MISTRAL):  # transformers gives a Mistral that does not mention it a window of 4,096 tokens
        window = config.get("sliding_window", 4096 if family is MISTRAL else None)
    fix = "where no sequence is longer, write null for it in config.json"
    require(not window, "policy.model", "must use full attention", f"sliding window {window}", fix)
    kinds = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    require(not kinds, "policy.model", "must use full attention in every layer", kinds, where)
    if family is MIMO:
        layers = config.get("num_nextn_predict_layers")
        require(layers == 1, "policy.model", f"must have num_nextn_predict_layers 1 as a {family.name}", layers, where)
    if family.divides_hidden:
        hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
        rule = f"the head_dim of a {family.name} must be hidden_size / num_attention_heads = {hidden} / {heads}"
        require(dim * heads == hidden, "policy.model", f"{rule}, as vLLM has it", dim, where)


def num_positions(config: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that vLLM serves a `config.json` for; beyond them it has no angles.

    Source: `_get_and_verify_max_len` of vLLM 0.32, and its `layers/rotary_embedding`: YaRN's table of angles ends at
    `factor` times the original positions.
    """
    rope, positions = _rope(config), config["max_position_embeddings"]
    factor = rope.get("factor") or 1
    match rope["rope_type"]:
        case RopeType.LINEAR:
            return int(factor * positions)
        case RopeType.YARN:
            return min(positions, int(factor * rope.get(_ORIGINAL, positions)))
        case _:
            return positions


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the rotary embedding; transformers 5 prefers the older name where both are there."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = {_ORIGINAL: config[_ORIGINAL]} if config.get(_ORIGINAL) else {}
    return {**rope, **original, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _rope_theta(config: Mapping[str, Any], family: Family) -> float:
    theta = _rope(config).get("rope_theta", config.get("rope_theta"))
    if theta is None and family is LLAMA:
        return 10_000.0  # the files of Llama 2 do not name it
    if theta is None:
        raise ConfigError("policy.model has no rope_theta in its config.json")
    return float(theta)


def _rope_scaling(config: Mapping[str, Any], path: Path) -> RopeConfig | None:
    """Read the model's own scaling."""
    rope = _rope(config)
    kind, partial = rope["rope_type"], rope.get("partial_rotary_factor", 1.0)
    require(partial == 1, "policy.model", "must have partial_rotary_factor 1", partial, "the whole head is turned")
    if kind == "default":
        return None
    rule = f"must use RoPE of type default, {', '.join(RopeType)}"
    require(kind in list(RopeType), "policy.model", rule, kind, f"see {path}")
    names = {field.name for field in fields(RopeConfig)}
    given = {name: value for name, value in rope.items() if name in names and name != "type"}
    if kind == RopeType.LINEAR:
        given.pop(_ORIGINAL, None)  # neither transformers nor vLLM reads it
    else:
        given.setdefault(_ORIGINAL, config["max_position_embeddings"])
    try:
        return from_mapping(RopeConfig, {**given, "type": kind}, "rope_scaling")
    except ConfigError as error:
        raise ConfigError(f"policy.model must have a complete scaling in {path}/config.json: {error}") from None


def require_divisible(shape: Shape, parallel: ParallelConfig) -> None:
    """Check that the learner's ranks split the model evenly, and leave an MTP layer the states that it reads.

    Query heads need no check of their own, because every key-value head has the same number of them.
    """
    known = shape if isinstance(shape, Architecture) else None
    if known is not None and known.has_mtp:
        _require_whole_states(parallel)
    tensor, pipeline, context = parallel.tensor, parallel.pipeline, parallel.context
    for name, size in (
        ("key-value heads", shape.num_query_groups),
        ("ffn hidden size", shape.ffn_hidden_size),
        ("vocabulary", shape.vocab_size),
    ):
        require(size % tensor == 0, "learner.parallel.tensor", f"must divide the policy's {size} {name}", tensor)
    layers = shape.num_layers
    require(layers % pipeline == 0, "learner.parallel.pipeline", f"must divide the policy's {layers} layers", pipeline)
    groups = shape.num_query_groups // tensor
    rule = f"must divide the {groups} key-value heads that learner.parallel.tensor {tensor} leaves each rank"
    fix = "attention splits whole heads over these ranks: lower it, or tensor"
    require(groups % context == 0, "learner.parallel.context", rule, context, fix)
    _require_even_experts(None if known is None else known.experts, parallel)


def _require_even_experts(experts: Experts | None, parallel: ParallelConfig) -> None:
    if experts is None:
        rule = "must be 1 for a policy without experts"
        require(parallel.expert == 1, "learner.parallel.expert", rule, parallel.expert)
        return
    rule = f"must divide the policy's {experts.num_experts} experts"
    require(experts.num_experts % parallel.expert == 0, "learner.parallel.expert", rule, parallel.expert)
    rule = "must be 1 for a mixture of experts"
    fix = "deal the experts to data-parallel ranks with learner.parallel.expert instead"
    require(parallel.tensor == 1, "learner.parallel.tensor", rule, parallel.tensor, fix)


def _require_whole_states(parallel: ParallelConfig) -> None:
    rule = "must be 1 for a policy with an MTP layer, which reads states and embeddings of one stage"
    require(parallel.pipeline == 1, "learner.parallel.pipeline", rule, parallel.pipeline)
    rule = "must be 1 for a policy with an MTP layer, which reads the states of whole sequences"
    require(parallel.context == 1, "learner.parallel.context", rule, parallel.context)
    rule = "must be false for a policy with an MTP layer, which reads whole states"
    require(not parallel.sequence_parallel, "learner.parallel.sequence_parallel", rule, True)


def require_adaptable(shape: Shape, lora: LoraConfig) -> None:
    """Check that no target of `policy.lora` is a matrix of experts, and that the rank exceeds no side of a target."""
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
