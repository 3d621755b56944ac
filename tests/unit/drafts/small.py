"""Two chats of a policy of 16 tokens, and how its draft is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.small import draft_with

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
