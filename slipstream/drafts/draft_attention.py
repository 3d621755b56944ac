"""Attention of a draft's passes: dense within a chat, and of each later pass the token's own key alone.

In pass i a token sees the first pass' keys of its chat up to itself, and of passes 1 to i its own key: one score each.
A mask over a whole row would compute N^2 scores a pass, nearly all of them to throw away.

Legend: `N` tokens of a row, `B` chats of a rectangle, `S` tokens of its longest, `G` key-value heads, `R` query heads
of each, `D` head dim, `P` passes after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from slipstream.learner.packing import plan_rectangles

NAME = "slipstream_passes"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chats:
    """Where the chats of a row lie: in rectangles of chats of like lengths, padded to the longest.

    A cell of padding holds a copy of the chat's first token; no real token sees it.
    """

    tokens_BS: tuple[Tensor, ...]  # of each rectangle: which token of the row is in each cell
    future_SS: tuple[Tensor, ...]  # True where the key comes after the query
    cells_N: Tensor  # of each token, counted through all rectangles

    @classmethod
    def of(cls, document_ids_N: Tensor) -> Chats:
        """The chats of a row, one behind the other, by the number of the chat that each token belongs to."""
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
    attention_mask: Chats,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls an attention function, for a row.

    Args:
        query: [1, G * R, N, D] of a pass.
        key: [1, G, (1 + P) * N, D] of all passes so far.
        value: the same.
        attention_mask: where its chats lie.
    Returns:
        [1, N, G * R, D], and no scores.
    """
    del module
    num, groups = query.shape[2], key.shape[1]
    query_NGRD = query[0].transpose(0, 1).unflatten(1, (groups, -1)) * scaling
    first, *own_keys = key[0].transpose(0, 1).split(num)
    first_value, *own_values = value[0].transpose(0, 1).split(num)
    own_NGRP = None
    if own_keys:
        own_NGRP = torch.matmul(query_NGRD, torch.stack(own_keys, dim=-1))
    mixed, shares = [], []
    for tokens_BS, future_SS in zip(attention_mask.tokens_BS, attention_mask.future_SS, strict=True):
        chances = _scores(query_NGRD, first, tokens_BS, future_SS, own_NGRP).softmax(-1)
        size = tokens_BS.shape[1]
        values = first_value[tokens_BS].transpose(1, 2)  # [B, G, S, D]
        mixed.append(_by_cell(chances[..., :size] @ values, size))
        shares.append(_by_cell(chances[..., size:], size))
    cells_N = attention_mask.cells_N
    mixed_NGRD = torch.cat(mixed)[cells_N]
    if own_values:
        shares_NGRP = torch.cat(shares)[cells_N]
        mixed_NGRD = mixed_NGRD + torch.matmul(shares_NGRP, torch.stack(own_values, dim=-2))
    return mixed_NGRD.flatten(1, 2)[None], None


def _scores(
    query_NGRD: Tensor, key_NGD: Tensor, tokens_BS: Tensor, future_SS: Tensor, own_NGRP: Tensor | None
) -> Tensor:
    """[B, G, R * S, S + P] of a rectangle."""
    query = _stacked(query_NGRD[tokens_BS])
    scores = query @ key_NGD[tokens_BS].permute(0, 2, 3, 1)
    scores = scores.masked_fill(future_SS.repeat(query_NGRD.shape[2], 1), float("-inf"))
    return scores if own_NGRP is None else torch.cat([scores, _stacked(own_NGRP[tokens_BS])], dim=-1)


def _stacked(cells_BSGRX: Tensor) -> Tensor:
    """[B, G, R * S, X]: the query heads of a group one behind the other."""
    return cells_BSGRX.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_cell(stacked: Tensor, size: int) -> Tensor:
    """The inverse, cell by cell: [B * S, G, R, X]."""
    return stacked.unflatten(2, (-1, size)).permute(0, 3, 1, 2, 4).flatten(0, 1)


AttentionInterface.register(NAME, attend)
