"""Passes of an EAGLE-3 draft over its own states (training-time test), up to the input of its output head.

Chats are packed into rows and shifted. Pass i drafts, at every position at once, token i of the window that starts
there. In pass i a token attends to the first pass' keys of its chat up to itself, and to its own keys of passes 1 to i.
A mask over the whole row would compute N^2 scores a pass, almost all of them masked.

Legend: `T` tokens of a chat, `N` packed tokens of a row, `A` auxiliary layers, `H` hidden size, `S` packed tokens of a
chat, `L` of the longest in a row, `G` key-value heads, `R` query heads of each, `D` head dim, `P` passes after the
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, DynamicCache

from slipstream.drafts.learner_draft import Chats

if TYPE_CHECKING:
    from speculators.models.eagle3.core import Eagle3DraftModel

ATTENTION = "slipstream_passes"
"""Name under which `transformers` finds `attend`."""

_CPU = torch.device("cpu")
_KEPT_TOKENS = 2048
"""Longest chat whose attention is kept for the gradient; of a longer one it is computed anew, for it grows by S^2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedChats:
    """A row of chats, shifted as EAGLE-3 reads them; the batch dimension is 1."""

    input_ids: Tensor  # [1, N] the token after the one whose states are at the same position
    hidden_states: Tensor  # [1, N, AH] float32
    last: Tensor  # [1, N, H] float32, states of the token in input_ids, which predict the next token
    loss_mask: Tensor  # [1, N] bool, True where the predicted token belongs to a response
    position_ids: Tensor  # [1, N] from 1 in each chat
    lengths: list[int]  # of the chats, whose sum is N


def rows_of(chats: Chats, *, max_tokens: int, device: torch.device = _CPU) -> list[PackedChats]:
    """Pack chats in their order into rows of at most `max_tokens` tokens; a longer chat gets a row of its own."""
    rows: list[list[int]] = []
    taken = 0
    for index, tokens in enumerate(chats.token_ids):
        if not rows or taken + len(tokens) > max_tokens:
            rows.append([])
            taken = 0
        rows[-1].append(index)
        taken += len(tokens)
    packed = [pack_chats(chats.select(row), device=device) for row in rows]
    # A row whose responses are all too short to draft for gives no loss.
    return [row for row in packed if row.loss_mask.any()]


def pack_chats(chats: Chats, *, device: torch.device = _CPU) -> PackedChats:
    """Pack chats and shift them: within each chat, input ids, last states and mask move left by one.

    For a chat x0 .. xT with states g0 .. gT and last states y0 .. yT this gives rows (x1, g0, y1) .. (xT, gT-1, yT).
    Row j predicts the token after x(j+1); the first draft follows the first response token.
    """
    ids = [torch.tensor(tokens[1:], dtype=torch.long) for tokens in chats.token_ids]
    lengths = [len(each) for each in ids]
    positions = [torch.arange(1, num + 1) for num in lengths]
    each = zip(positions, chats.prompt_lengths, lengths, strict=True)
    # The last state of a chat predicts a token that was never sampled.
    masks = [(position >= start) & (position < num) for position, start, num in each]
    return PackedChats(
        input_ids=torch.cat(ids)[None].to(device),
        hidden_states=torch.cat([aux_TA[:-1].to(device).float() for aux_TA, _ in chats.states])[None],
        last=torch.cat([last_TH[1:].to(device).float() for _, last_TH in chats.states])[None],
        loss_mask=torch.cat(masks)[None].to(device),
        position_ids=torch.cat(positions)[None].to(device),
        lengths=lengths,
    )


def head_inputs(model: Eagle3DraftModel, batch: PackedChats, num_passes: int) -> list[Tensor]:
    """Compute the inputs of the draft's output head, [1, N, H] a pass; position j of pass i predicts for j + i.

    Every pass reads the chats' own tokens (teacher forcing).

    Source: the loop of `Eagle3DraftModel.forward` of speculators 0.9, which holds the logits [N, vocabulary] of all
    passes at once, and compiles itself where it sees a GPU.
    """
    (layer,) = model.layers
    num = batch.input_ids.shape[1]
    hidden = _joined(model, batch.hidden_states)
    ids, positions, cache = batch.input_ids, batch.position_ids, DynamicCache()
    outputs = []
    for number in range(num_passes):
        stacked = torch.cat([model.embed_tokens(ids).detach(), hidden], dim=-1)
        hidden = layer(
            stacked,
            attention_mask=batch.lengths,
            position_ids=positions,
            past_key_values=cache,
            cache_position=torch.arange(number * num, (number + 1) * num, device=hidden.device),
            position_embeddings=model.rotary_emb(stacked, positions),
        )
        outputs.append(model.norm(hidden))
        if model.config.norm_output:
            hidden = outputs[-1]
        # Tokens past the end of the row are padding, which no loss reads.
        ids = torch.cat([batch.input_ids[:, 1 + number :], batch.input_ids.new_zeros(1, 1 + number)], dim=-1)[:, :num]
        positions = positions + 1
    return outputs


def _joined(model: Eagle3DraftModel, states_NA: Tensor) -> Tensor:
    """[1, N, H] the auxiliary layers' states in one, after the norm or norms that the draft has for them."""
    if model.input_norm is not None:
        states_NA = model.input_norm(states_NA)
    if model.fc_norm is not None:
        parts = states_NA.chunk(len(model.fc_norm), dim=-1)
        states_NA = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], dim=-1)
    joined: Tensor = model.fc(states_NA)
    return joined


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Sequence[int],
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within the chats of a row, with the signature that `transformers` calls.

    Args:
        query: [1, G * R, N, D] of one pass.
        key, value: [1, G, (1 + P) * N, D] of all passes so far.
        attention_mask: lengths of the row's chats.
    Returns:
        [1, N, G * R, D], and None in place of the scores.
    """
    num, groups = query.shape[2], key.shape[1]
    query_NGRD = query[0].transpose(0, 1).unflatten(1, (groups, -1)) * scaling
    first, *own_keys = key[0].transpose(0, 1).split(num)
    first_value, *own_values = value[0].transpose(0, 1).split(num)
    own = (torch.stack(own_keys, dim=-1), torch.stack(own_values, dim=-2)) if own_keys else None
    return mix(query_NGRD, first, first_value, own, attention_mask).flatten(1, 2)[None], None


def mix(
    query_NGRD: Tensor, key_NGD: Tensor, value_NGD: Tensor, own: tuple[Tensor, Tensor] | None, lengths: Sequence[int]
) -> Tensor:
    """Mix values of the chats' tokens up to each token, and of its own further keys; returns [N, G, R, D].

    Args:
        query_NGRD: queries times the scaling.
        own: each token's further keys [N, G, D, P] and values [N, G, P, D]; None without any.
        lengths: those of the row's chats.
    """
    scores_NGRP = query_NGRD.new_empty((*query_NGRD.shape[:-1], 0)) if own is None else query_NGRD @ own[0]
    future_LL = torch.ones(max(lengths), max(lengths), dtype=torch.bool, device=query_NGRD.device).triu(1)
    mixed, shares, by_token = [], [], (query_NGRD, key_NGD, value_NGD, scores_NGRP)
    for chat in zip(*(each.split(list(lengths)) for each in by_token), strict=True):
        if len(chat[0]) > _KEPT_TOKENS:
            found = checkpoint(_within, future_LL, *chat, use_reentrant=False, preserve_rng_state=False)
        else:
            found = _within(future_LL, *chat)
        mixed.append(found[0])
        shares.append(found[1])
    mixed_NGRD = torch.cat(mixed)
    return mixed_NGRD if own is None else mixed_NGRD + torch.cat(shares) @ own[1]


def _within(
    future_LL: Tensor, query_SGRD: Tensor, key_SGD: Tensor, value_SGD: Tensor, scores_SGRP: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix the first pass' values in a chat, [S, G, R, D]; shares of each token's own keys, [S, G, R, P]."""
    size, _, repeats, _ = query_SGRD.shape
    products = query_SGRD.permute(1, 2, 0, 3).flatten(1, 2) @ key_SGD.permute(1, 2, 0)  # [G, R * S, S]
    scores_GRSS = products.unflatten(1, (repeats, size)).masked_fill(future_LL[:size, :size], float("-inf"))
    chances_GRSX = torch.cat([scores_GRSS, scores_SGRP.permute(1, 2, 0, 3)], dim=-1).softmax(-1)
    mixed = chances_GRSX[..., :size].flatten(1, 2) @ value_SGD.transpose(0, 1)
    mixed_GRSD = mixed.unflatten(1, (repeats, size))
    return mixed_GRSD.permute(2, 0, 1, 3), chances_GRSX[..., size:].permute(2, 0, 1, 3)


AttentionInterface.register(ATTENTION, attend)
