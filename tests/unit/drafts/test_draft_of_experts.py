"""The draft of a mixture of experts."""

from __future__ import annotations

from pathlib import Path

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.eagle3 import build_draft
from tests.integration import qwen3_moe


def test_it_is_a_dense_layer_as_wide_as_the_experts_of_a_token(tmp_path: Path) -> None:
    qwen3_moe.write_model(tmp_path, seed=0, expert_width=48)
    draft = build_draft(tmp_path, DraftConfig(aux_hidden_state_layer_ids=(0, 1, 2)))
    layer = draft.config.transformer_layer_config
    assert (layer.model_type, layer.num_hidden_layers, layer.intermediate_size) == ("qwen3", 1, 2 * 48)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 32)
    assert draft.layers[0].mlp.gate_proj.weight.shape == (96, 64)
