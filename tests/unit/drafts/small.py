"""Two chats of a policy of 16 tokens, and how its draft is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slipstream.drafts.learner_draft import Chats, States
from tests.small import draft_with
from tests.unit.learner.families import write_model

CONFIG = draft_with(
    eagle3={"aux_hidden_state_layer_ids": (0, 1, 2)},
    pretrain={"num_steps": 30, "optimizer": {"warmup_steps": 2, "learning_rate": 3e-3}, "ttt_steps": 3},
)
CHATS = [[2, 5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 3], [2, 9, 5, 6, 7, 8, 9, 3]]
PROMPTS = [3, 2]
WORDS = {"a": 0, "b": 1}


def model(path: Path, words: dict[str, int] | None = WORDS, **changes: Any) -> Path:
    path.mkdir()
    values = {"vocab_size": 64, "max_position_embeddings": 512, "eos_token_id": 3, **changes}
    (path / "config.json").write_text(json.dumps(values))
    save_file({"w": torch.zeros(2, 3)}, path / "model.safetensors")
    if words is not None:
        added = [{"content": "<end>", "id": 3}]
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": added}))
    return path


def policy_of(path: Path, *, num_layers: int) -> Path:
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    write_model(path, "qwen3", **sizes, **heads, eos_token_id=3, initializer_range=0.3)
    return path


def edit_tensors(draft: Path, **changed: torch.Tensor | None) -> None:
    """Put these tensors in the place of a saved draft's own; None drops one."""
    tensors = {**load_file(draft / "model.safetensors"), **changed}
    save_file({name: each for name, each in tensors.items() if each is not None}, draft / "model.safetensors")


def teach(trainer: Any, chats: Chats, num_steps: int, *, falls_to: float = 1.0) -> tuple[float, ...]:
    """Train a draft, whose loss falls and whose held-out acceptance rises; its rates by position."""
    _, before = trainer.evaluate(chats)
    losses = [trainer.step(chats) for _ in range(num_steps)]
    rates, after = trainer.evaluate(chats)
    assert losses[-1] < falls_to * losses[0]
    assert 1.0 <= before < after <= 1.0 + len(rates)
    return rates


def states_of(policy: Path) -> States:
    """The states of the embeddings and of each layer, and those of the last layer, for each chat."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(policy)
    found = []
    for chat in CHATS:
        with torch.no_grad():
            hidden = model(torch.tensor([chat]), output_hidden_states=True).hidden_states
        found.append((torch.cat(hidden, dim=-1)[0], hidden[-1][0]))
    return found
