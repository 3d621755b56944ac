"""Passes of an EAGLE-3 draft over its own states (training-time test), up to the input of its output head.

Chats are packed into rows and shifted. Pass i drafts, at every position at once, token i of the window that starts
there. In pass i a token attends to the first pass' keys of its chat up to itself, and to its own keys of passes 1 to i.
A mask over the whole row would compute N^2 scores a pass, almost all of them masked.

Legend: `T` tokens of a chat, `N` packed tokens of a row, `A` auxiliary layers, `H` hidden size, `B` chats of a
rectangle, `S` tokens of its longest, `G` key-value heads, `R` query heads of each, `D` head dim, `P` passes after the
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
from slipstream.learner.packing import plan_rectangles

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
    document_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N] from 1 in each chat


def rows_of(chats: Chats, *, max_tokens: int, device: torch.device = _CPU) -> list[PackedChats]:
    """Pack chats in their order into rows of at most `max_tokens` tokens; a longer chat gets a row of its own."""
    rows: list[list[int]] = []
    taken = 0
    for index, tokens in enumerate(chats.sequences):
        if not rows or taken + len(tokens) > max_tokens:
            rows.append([])
            taken = 0
        rows[-1].append(index)
        taken += len(tokens)
    packed = [pack_chats(chats.some(row), device=device) for row in rows]
    # A row whose responses are all too short to draft for gives no loss.
    return [row for row in packed if row.loss_mask.any()]


def pack_chats(chats: Chats, *, device: torch.device = _CPU) -> PackedChats:
    """Pack chats and shift them: within each chat, input ids, last states and mask move left by one.

    For a chat x0 .. xT with states g0 .. gT and last states y0 .. yT this gives rows (x1, g0, y1) .. (xT, gT-1, yT).
    Row j predicts the token after x(j+1); the first draft follows the first response token.
    """
    ids, hidden, last, mask, documents, places = [], [], [], [], [], []
    each = zip(chats.sequences, chats.prompt_lengths, chats.states, strict=True)
    for index, (tokens, start, (aux_TA, last_TH)) in enumerate(each):
        num = len(tokens) - 1
        ids.append(torch.tensor(tokens[1:], dtype=torch.long))
        hidden.append(aux_TA[:-1].to(device).float())
        last.append(last_TH[1:].to(device).float())
        position = torch.arange(1, num + 1)
        # The last state of a chat predicts a token that was never sampled.
        mask.append((position >= start) & (position < num))
        documents.append(torch.full((num,), index))
        places.append(position)
    return PackedChats(
        input_ids=torch.cat(ids)[None].to(device),
        hidden_states=torch.cat(hidden)[None],
        last=torch.cat(last)[None],
        loss_mask=torch.cat(mask)[None].to(device),
        document_ids=torch.cat(documents)[None].to(device),
        position_ids=torch.cat(places)[None].to(device),
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
    chats = ChatRectangles.of(batch.document_ids[0])
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatRectangles:
    """Layout of a row's chats in rectangles of similar lengths, padded to the longest chat of each.

    Padding repeats the chat's first token, and no real token attends to it.
    """

    tokens_BS: tuple[Tensor, ...]  # by rectangle: the row's token in each cell
    future_SS: tuple[Tensor, ...]  # by rectangle: True where the key comes after the query
    cells_N: Tensor  # cell of each token, counted over all rectangles

    @classmethod
    def of(cls, document_ids_N: Tensor) -> ChatRectangles:
        """Lay out a row's chats from the chat number of each token."""
        device = document_ids_N.device
        lengths = torch.unique_consecutive(document_ids_N, return_counts=True)[1].tolist()
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        tokens, future, cells, num_cells = [], [], torch.empty(sum(lengths), dtype=torch.long), 0
        for first, last in plan_rectangles([lengths[index] for index in order]):
            width = lengths[order[first]]
            chats = order[first:last]
            tokens.append(_tokens([starts[chat] for chat in chats], [lengths[chat] for chat in chats], width))
            future.append(torch.ones(width, width, dtype=torch.bool, device=device).triu(1))
            for chat in chats:
                cells[starts[chat] : starts[chat] + lengths[chat]] = torch.arange(lengths[chat]) + num_cells
                num_cells += width
        return cls(
            tokens_BS=tuple(each.to(device) for each in tokens), future_SS=tuple(future), cells_N=cells.to(device)
        )


def _tokens(starts: Sequence[int], lengths: Sequence[int], width: int) -> Tensor:
    place = torch.arange(width)
    start, length = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
    return torch.where(place < length, start + place, start)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ChatRectangles,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within the chats of a row, with the signature that `transformers` calls.

    Args:
        query: [1, G * R, N, D] of one pass.
        key: [1, G, (1 + P) * N, D] of all passes so far.
        value: [1, G, (1 + P) * N, D].
        attention_mask: layout of the row's chats.
    Returns:
        [1, N, G * R, D], and None in place of the scores.
    """
    del module
    num, groups = query.shape[2], key.shape[1]
    query_NGRD = query[0].transpose(0, 1).unflatten(1, (groups, -1)) * scaling
    first, *own_keys = key[0].transpose(0, 1).split(num)
    first_value, *own_values = value[0].transpose(0, 1).split(num)
    own = (torch.stack(own_keys, dim=-1), torch.stack(own_values, dim=-2)) if own_keys else None
    return mix(query_NGRD, first, first_value, own, attention_mask).flatten(1, 2)[None], None


def mix(
    query_NGRD: Tensor, key_NGD: Tensor, value_NGD: Tensor, own: tuple[Tensor, Tensor] | None, chats: ChatRectangles
) -> Tensor:
    """Mix values of the chats' tokens up to each token, and of its own further keys; returns [N, G, R, D].

    Args:
        query_NGRD: queries times the scaling.
        own: each token's further keys [N, G, D, P] and values [N, G, P, D]; None without any.
    """
    own_NGRP = None if own is None else torch.matmul(query_NGRD, own[0])
    mixed, shares = [], []
    for rectangle in zip(chats.tokens_BS, chats.future_SS, strict=True):
        inputs = (query_NGRD, key_NGD, value_NGD, own_NGRP, *rectangle)
        if len(rectangle[1]) > _KEPT_TOKENS:
            found = checkpoint(_within, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            found = _within(*inputs)
        mixed.append(found[0])
        shares.append(found[1])
    mixed_NGRD = torch.cat(mixed)[chats.cells_N]
    if own is None:
        return mixed_NGRD
    return mixed_NGRD + torch.matmul(torch.cat(shares)[chats.cells_N], own[1])


def _within(
    query_NGRD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
    own_NGRP: Tensor | None,
    tokens_BS: Tensor,
    future_SS: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mix the first pass' values in a rectangle, [B * S, G, R, D]; shares of the own keys, [B * S, G, R, P]."""
    chances = _scores(query_NGRD, key_NGD, tokens_BS, future_SS, own_NGRP).softmax(-1)
    size = tokens_BS.shape[1]
    values = value_NGD[tokens_BS].transpose(1, 2)  # [B, G, S, D]
    return _by_cell(chances[..., :size] @ values, size), _by_cell(chances[..., size:], size)


def _scores(
    query_NGRD: Tensor, key_NGD: Tensor, tokens_BS: Tensor, future_SS: Tensor, own_NGRP: Tensor | None
) -> Tensor:
    """Scores of a rectangle, [B, G, R * S, S + P]."""
    query = _stacked(query_NGRD[tokens_BS])
    scores = query @ key_NGD[tokens_BS].permute(0, 2, 3, 1)
    scores = scores.masked_fill(future_SS.repeat(query_NGRD.shape[2], 1), float("-inf"))
    return scores if own_NGRP is None else torch.cat([scores, _stacked(own_NGRP[tokens_BS])], dim=-1)


def _stacked(cells_BSGRX: Tensor) -> Tensor:
    """Stack the query heads of a group, [B, G, R * S, X]."""
    return cells_BSGRX.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_cell(stacked: Tensor, size: int) -> Tensor:
    """Undo `_stacked` and flatten to cells, [B * S, G, R, X]."""
    return stacked.unflatten(2, (-1, size)).permute(0, 3, 1, 2, 4).flatten(0, 1)


AttentionInterface.register(ATTENTION, attend)
