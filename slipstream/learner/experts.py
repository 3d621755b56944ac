"""What of a mixture of experts its tensors and its forward pass follow from, and how experts may be dealt to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.config import require
from slipstream.learner.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The feed-forward of the layers that route each token to a few of many networks."""

    num_experts: int
    num_experts_per_token: int
    ffn_hidden_size: int  # of one expert
    normalizes_chosen: bool  # whether the weights of a token's experts sum to one, or are their share of all experts'
    dense_layers: tuple[int, ...] = ()  # layers with one network instead, of the model's `ffn_hidden_size`

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Experts:
        """Those of a Qwen3-MoE's `config.json`.

        Raises:
            ConfigError: a router that gets no gradient, or no layer with experts.
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
        """What a `config.json` says of them."""
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

    def are_in(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.dense_layers

    def num_parameters(self, hidden_size: int) -> int:
        """Of a layer's router and experts."""
        return self.num_experts * hidden_size * (1 + 3 * self.ffn_hidden_size)


def require_even_experts(experts: Experts | None, parallel: ParallelConfig) -> None:
    """Refuse layouts that the policy's experts, or their absence, rule out.

    Raises:
        ConfigError: a dense policy with `expert` above 1, experts that do not divide, or tensor parallelism with them.
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
