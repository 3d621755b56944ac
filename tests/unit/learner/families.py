"""Tiny models of each family with random weights, biases and norms too, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.unit.learner.policies import VOCAB

# An original length of 8 positions: wavelengths of this head are kept, blended and divided.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
# 64 positions as the table of a model of 8: frequencies of this head are kept, blended and divided.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 0.1,
    "original_max_position_embeddings": 8,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "initializer_range": 0.15,  # the default gives nearly equal logits
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2.5": ("qwen2", {"tie_word_embeddings": True, "eos_token_id": [1, 5]}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "llama2": ("llama", {"num_key_value_heads": 4, "rope_parameters": None}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": LINEAR, "max_position_embeddings": 16}),
    "yarn": ("qwen3", {"rope_parameters": YARN, "head_dim": 32}),
    "smollm2": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
}


def write_model(path: Path, name: str, *, seed: int = 0, **change: Any) -> PreTrainedModel:
    """Write a directory as it would come from a hub, and return what transformers computes with."""
    kind, own = MODELS[name]
    config = AutoConfig.for_model(kind, **{**_SIZES, **own, **change})
    torch.manual_seed(seed)
    built: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in built.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape) * 0.3)
    built.save_pretrained(path)
    return built
