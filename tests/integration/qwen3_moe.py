"""A tiny Qwen3-MoE with random weights, written by transformers, which also says what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 64


def write_model(path: Path, *, seed: int, normalizes: bool = True, expert_width: int = 32) -> None:
    """Eight experts, two of them a token, in all layers but the second."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # type: ignore[call-arg]  # kept as an attribute, which the model reads
        moe_intermediate_size=expert_width,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=normalizes,
        mlp_only_layers=[1],
        max_position_embeddings=128,
        eos_token_id=1,
        initializer_range=0.15,  # the default gives nearly equal logits
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)


def sequences() -> list[list[int]]:
    """Sequences of different lengths, for which two ranks need different numbers of micro-batches."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length).tolist() for length in (31, 6, 29, 5, 30)]


def logprobs(path: Path, tokens: Sequence[int]) -> np.ndarray:
    """By transformers, in float32: of each token but the first."""
    return routed(load(path), tokens)[0].detach().numpy()


def load(path: Path) -> Qwen3MoeForCausalLM:
    """The model in transformers, in float32."""
    return Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32)


def routers(model: Qwen3MoeForCausalLM) -> list[Any]:
    """The router of each layer; None of a dense one."""
    blocks: list[Any] = [layer.mlp for layer in model.model.layers]
    return [getattr(block, "gate", None) for block in blocks]


def gradients(
    path: Path, batch: Sequence[Sequence[int]], routes: Sequence[np.ndarray | None] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean next-token loss and its gradients by transformers, under the names of a checkpoint.

    Args:
        routes: experts of each sequence's inputs that replace the routers' own.
    """
    model = load(path)
    num_tokens = sum(len(tokens) - 1 for tokens in batch)
    total = torch.zeros(())
    for tokens, given in zip(batch, routes or [None] * len(batch), strict=True):
        total = total - routed(model, tokens, given)[0].sum()
    loss = total / num_tokens
    loss.backward()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = parameter.grad
            continue
        layer = name.rpartition(".")[0]
        for expert, grad in enumerate(parameter.grad):
            if name.endswith("down_proj"):
                found[f"{layer}.{expert}.down_proj.weight"] = grad
            else:
                gate, up = grad.chunk(2)
                found |= {f"{layer}.{expert}.gate_proj.weight": gate, f"{layer}.{expert}.up_proj.weight": up}
    return float(loss.detach()), found


def routed(
    model: Qwen3MoeForCausalLM, tokens: Sequence[int], routes: np.ndarray | None = None
) -> tuple[torch.Tensor, np.ndarray]:
    """By transformers: logprobs of each token but the first, and the experts [T, layers, 2] of each but the last.

    Args:
        routes: experts that replace the routers' own, with the weights that the routers give them.
    """
    ids = torch.tensor(tokens)
    found = np.zeros((len(tokens) - 1, model.config.num_hidden_layers, 2), np.int64)

    def choose(layer: int, router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, experts = output
        if routes is not None:
            experts = torch.from_numpy(routes[:, layer])
            weights = logits.softmax(-1).gather(1, experts)
            weights = weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights
        found[:, layer] = experts
        return logits, weights, experts

    hooks = [
        router.register_forward_hook(partial(choose, number))
        for number, router in enumerate(routers(model))
        if router is not None
    ]
    rows = model(ids[None, :-1]).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return rows.gather(1, ids[1:, None])[:, 0], found
