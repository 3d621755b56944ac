"""The passes of a draft over its own states (EAGLE-3's training-time test), up to what its output head reads.

Pass i drafts, at every position at once, the token i of the window that starts there. Legend: `N` packed tokens, `H`
hidden size.
"""

from __future__ import annotations

import torch
from speculators.models.eagle3.core import Eagle3DraftModel
from torch import Tensor
from transformers import DynamicCache

from slipstream.drafts.chats import PackedChats
from slipstream.drafts.draft_attention import Chats


def head_inputs(model: Eagle3DraftModel, batch: PackedChats, num_passes: int) -> list[Tensor]:
    """What the draft's output head reads in each pass, [1, N, H] each; position j of pass i speaks of position j + i.

    The chats' own tokens are fed in each pass (teacher forcing).

    Source: the loop of `Eagle3DraftModel.forward` of speculators 0.9. That one holds the logits [N, vocabulary] of all
    passes at once, and where it sees a GPU it compiles itself.
    """
    (layer,) = model.layers
    num = batch.input_ids.shape[1]
    hidden = model.fc(batch.hidden_states)
    chats = Chats.of(batch.document_ids[0])
    ids, positions, cache = batch.input_ids, batch.position_ids, DynamicCache()
    outputs = []
    for number in range(num_passes):
        stacked = torch.cat([model.embed_tokens(ids).detach(), hidden], dim=-1)
        hidden = layer(
            stacked,
            attention_mask=chats,
            position_ids=positions,
            past_key_values=cache,
            cache_position=torch.arange(number * num, (number + 1) * num, device=hidden.device),
            position_embeddings=model.rotary_emb(stacked, positions),
        )
        outputs.append(model.norm(hidden))
        if model.config.norm_output:
            hidden = outputs[-1]
        # What is fed past the end of the row stands for nothing: no loss looks at it.
        ids = torch.cat([batch.input_ids[:, 1 + number :], batch.input_ids.new_zeros(1, 1 + number)], dim=-1)[:, :num]
        positions = positions + 1
    return outputs
