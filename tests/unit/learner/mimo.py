"""A small MiMo with random weights, biases and norms too, and what it computes according to others.

The trunk is a Qwen2, which transformers has. The layer that predicts the token after the next is written out here as
vLLM's `mimo_mtp.py` has it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from slipstream.learner.architecture import Architecture
from slipstream.learner.config import ScratchConfig, ShapeConfig
from slipstream.learner.weights import initial_weights
from slipstream.types import Dtype

VOCAB = 32
SCRATCH = ScratchConfig(
    shape=ShapeConfig(hidden_size=128, num_layers=3, head_dim=32, ffn_hidden_size=48, init_std=0.1),
    max_position_embeddings=64,
    num_steps=30,
    num_mtp_layers=1,
    seed=3,
)
ARCH = Architecture.from_scratch(SCRATCH, vocab_size=VOCAB, eos_token_id=1)


def random_weights(arch: Architecture = ARCH, *, seed: int = 0) -> dict[str, Tensor]:
    """Nothing is left at the zeros and ones that a fresh model starts from."""
    generator = torch.Generator().manual_seed(seed)
    weights = initial_weights(arch, std=0.1, seed=seed)
    for tensor in weights.values():
        if tensor.dim() == 1:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return weights


def write_model(path: Path, arch: Architecture = ARCH, *, seed: int = 0) -> Path:
    """A directory as it would come from a hub."""
    path.mkdir(parents=True)
    save_file(random_weights(arch, seed=seed), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(arch.to_hf(Dtype.FLOAT32)))
    return path


def sequences(count: int = 9, *, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(0, VOCAB, rng.integers(6, 30)).tolist()) for _ in range(count))


@torch.no_grad()
def trunk(path: Path, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """By transformers: the residual stream before the final norm [T, H], and the logits [T, V]."""
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
    kept: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))
    logits = model(torch.tensor([list(tokens)])).logits[0]
    return kept[0], logits


@torch.no_grad()
def mtp_states(path: Path, states_TH: Tensor, tokens: Sequence[int]) -> Tensor:
    """[T - 1, H]: what the output layer sees of the draft of each position whose next token is known."""
    weights = load_file(path / "model.safetensors")
    config = Qwen2Config.from_pretrained(path)
    config._attn_implementation = "eager"
    prefix = "model.mtp_layers.0."
    mine = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}

    def norm(name: str, x: Tensor) -> Tensor:
        module = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        module.weight.data.copy_(mine[f"{name}.weight"])
        return module(x)

    count = len(tokens) - 1
    positions = torch.arange(count)
    embeddings = weights["model.embed_tokens.weight"][torch.tensor(list(tokens[1:]))]
    embeddings = torch.where(positions.unsqueeze(-1) == 0, 0, embeddings)
    joined = torch.cat([norm("hidden_layernorm", states_TH[:count]), norm("token_layernorm", embeddings)], dim=-1)
    hidden = joined @ mine["input_proj.weight"].t()
    block = Qwen2DecoderLayer(config, layer_idx=0)
    block.load_state_dict({name: mine[name] for name in block.state_dict()})
    angles = Qwen2RotaryEmbedding(config)(hidden[None], positions[None])
    future = torch.full((count, count), float("-inf")).triu(1)[None, None]
    out = block(hidden[None], attention_mask=future, position_embeddings=angles)
    out = out[0] if isinstance(out, tuple) else out
    return norm("final_layernorm", out[0])


def logits(path: Path, states_TH: Tensor) -> Tensor:
    """[T, V] of what the output layer sees."""
    return states_TH @ load_file(path / "model.safetensors")["lm_head.weight"].t()
