"""Two chats of a policy of 16 tokens, and how its draft is trained."""

from __future__ import annotations

from slipstream.drafts.config import DraftConfig

CONFIG = DraftConfig(
    aux_hidden_state_layer_ids=(0, 1, 2), num_steps=30, warmup_steps=2, ttt_steps=3, learning_rate=3e-3
)
CHATS = [[2, 5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 3], [2, 9, 5, 6, 7, 8, 9, 3]]
PROMPTS = [3, 2]
