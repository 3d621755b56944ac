"""DFlash drafts of speculators: a few layers that propose all tokens of a block in one pass.

A block is the token that the policy sampled last, followed by a mask token for each token to be drafted. Each layer
attends to keys of the policy's hidden states of all earlier tokens, and to the whole block in both directions. A mask
token's output predicts the token in its place, without knowing the drafts before it.

Training drafts a block after every position of the packed chats. The input of the output head for draft token i at
position j has the meaning of pass i of an EAGLE-3 draft (`drafts/passes.py`), so both share loss and acceptance.

Source: DFlash (arXiv 2602.06036); the layers are those of speculators 0.9, which vLLM loads.

Legend: `N` packed tokens of a row, `W` tokens of a block, `A` auxiliary layers, `H` hidden size, `G` key-value heads,
`R` query heads of each, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from speculators.models.dflash import DFlashDraftModel
from torch import Tensor
from transformers import AttentionInterface

from slipstream.drafts.config import DraftConfig
from slipstream.drafts.eagle3 import fresh_draft, layer_config, trainable
from slipstream.drafts.passes import PackedChats, mix
from slipstream.learner.architecture import Architecture, aux_layer_ids

ATTENTION = "slipstream_blocks"
"""Name under which `transformers` finds `attend_to_blocks`."""


def build_dflash(policy: Path, config: DraftConfig, *, token_ids: Sequence[int] | None = None) -> DFlashDraftModel:
    """Build a fresh draft of random layers, with output head and vocabulary as in `build_draft`."""
    model = fresh_draft(
        DFlashDraftModel,
        layer_config(policy, num_layers=config.dflash.num_layers, is_qwen3=True),
        policy,
        token_ids,
        seed=config.seed,
        block_size=config.pretrain.ttt_steps + 1,
        target_layer_ids=list(aux_layer_ids(None, Architecture.from_hf(policy).num_layers)),
        sample_from_anchor=False,
        sliding_window_non_causal=True,  # vLLM makes every layer causal where a config does not say so
    )
    model.config.mask_token_id = mask_token_id(model.embed_tokens.weight)
    return trainable(model, ATTENTION)


def mask_token_id(embeddings_VH: Tensor) -> int:
    """Choose the last token of the policy's vocabulary whose embedding is of an ordinary size.

    The mask has the policy's embedding of this token. Rows behind the last token may be zeros, and all mask tokens of a
    block would then be alike, whatever their positions.
    """
    sizes = embeddings_VH.norm(dim=1)
    return int((sizes >= sizes.median() / 2).nonzero()[-1])


def block_inputs(model: DFlashDraftModel, batch: PackedChats, num_tokens: int) -> list[Tensor]:
    """Compute the inputs of the draft's output head, [1, N, H] for each token of a block of `num_tokens` drafts.

    Position j of the i-th predicts for j + i, as in `passes.head_inputs`.

    Source: `DFlashDraftModel._backbone_forward` of speculators 0.9, which drafts at a random choice of positions.
    """
    width = num_tokens + 1
    context = model.hidden_norm(model.fc(batch.hidden_states))
    ids = batch.input_ids[0, :, None].expand(-1, width).clone()
    ids[:, 1:] = model.mask_token_id
    places = batch.position_ids[0, :, None] + torch.arange(width, device=ids.device)
    # The states of the token before are the newest that a block's first token sees.
    positions = torch.cat([batch.position_ids[0] - 1, places.flatten()])[None]
    hidden = model.embed_tokens(ids.view(1, -1)).detach()
    lengths, turned = batch.lengths, model.rotary_emb(hidden, positions)
    for layer in model.layers:
        hidden = layer(target_hidden=context, hidden_states=hidden, attention_mask=lengths, position_embeddings=turned)
    return list(model.norm(hidden).unflatten(1, (-1, width)).unbind(2)[1:])


def attend_to_blocks(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Sequence[int],
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to a chat's states up to a block, and within the block, with the signature that `transformers` calls.

    Args:
        query: [1, G * R, N * W, D] of the blocks.
        key, value: [1, G, N + N * W, D] of the states, then of the blocks.
        attention_mask: lengths of the row's chats.
    Returns:
        [1, N * W, G * R, D], and None in place of the scores.
    """
    num, groups = sum(attention_mask), key.shape[1]
    width = query.shape[2] // num
    # A block's tokens see the same states, so they count as further query heads of the token that it begins with.
    query_NGQD = query[0].unflatten(1, (num, width)).unflatten(0, (groups, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)
    (states, own), (state_values, own_values) = (each[0].split([num, num * width], dim=1) for each in (key, value))
    blocks = own.unflatten(1, (num, width)).permute(1, 0, 3, 2), own_values.unflatten(1, (num, width)).transpose(0, 1)
    found_NGQD = mix(query_NGQD * scaling, states.transpose(0, 1), state_values.transpose(0, 1), blocks, attention_mask)
    found_NWGRD = found_NGQD.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4)
    return found_NWGRD.flatten(2, 3).flatten(0, 1)[None], None


AttentionInterface.register(ATTENTION, attend_to_blocks)
