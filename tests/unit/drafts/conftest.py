"""A policy of two layers and 16 tokens, what it computes of two chats, and a fresh draft of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.drafts.small import CHATS, CONFIG


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=3,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def states(policy: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(policy)
    found = []
    for chat in CHATS:
        with torch.no_grad():
            hidden = model(torch.tensor([chat]), output_hidden_states=True).hidden_states
        found.append((torch.cat(hidden, dim=-1)[0], hidden[-1][0]))
    return found


@pytest.fixture
def draft(policy: Path, tmp_path: Path) -> Path:
    from slipstream.drafts.trainer import DraftTrainer

    DraftTrainer(policy, CONFIG).save(tmp_path / "draft")
    return tmp_path / "draft"
