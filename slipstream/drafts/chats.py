"""Chats as a draft's training reads them: packed into rows, one behind the other, and shifted.

Legend: `T` tokens of a chat, `N` packed tokens, `A` auxiliary layers, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

States = Sequence[tuple[Tensor, Tensor]]
"""For each sequence of T tokens the auxiliary hidden states [T, AH] and what the output layer sees [T, H]."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedChats:
    """Chats one behind the other, aligned as EAGLE-3 reads them; the batch dimension is 1."""

    input_ids: Tensor  # [1, N] the token after the one whose states stand beside it
    hidden_states: Tensor  # [1, N, AH] float32
    last: Tensor  # [1, N, H] float32, states of the token in input_ids: they predict the token after it
    loss_mask: Tensor  # [1, N] bool: what is predicted belongs to a response
    document_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N] from 1 in each chat


def rows_of(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    states: States,
    *,
    max_tokens: int,
    device: torch.device = _CPU,
) -> list[PackedChats]:
    """Chats in rows of at most `max_tokens` tokens (a longer chat has a row of its own), in their order."""
    rows: list[list[int]] = []
    taken = 0
    for index, tokens in enumerate(sequences):
        if not rows or taken + len(tokens) > max_tokens:
            rows.append([])
            taken = 0
        rows[-1].append(index)
        taken += len(tokens)
    packed = [
        pack_chats(
            [sequences[i] for i in row], [prompt_lengths[i] for i in row], [states[i] for i in row], device=device
        )
        for row in rows
    ]
    # A row whose responses are all too short to draft for teaches nothing.
    return [row for row in packed if row.loss_mask.any()]


def pack_chats(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    states: States,
    *,
    device: torch.device = _CPU,
) -> PackedChats:
    """Pack chats and shift them: input ids, last states and mask move left by one within each chat, states stay.

    For a chat x0 .. xT with states g0 .. gT and last states y0 .. yT this gives rows (x1, g0, y1) .. (xT, gT-1, yT).
    Row j predicts the token after x(j+1); the first draft follows the first response token.
    """
    ids, hidden, last, mask, documents, places = [], [], [], [], [], []
    for index, (tokens, start, (aux_TA, last_TH)) in enumerate(zip(sequences, prompt_lengths, states, strict=True)):
        num = len(tokens) - 1
        ids.append(torch.tensor(tokens[1:], dtype=torch.long))
        hidden.append(aux_TA[:-1].to(device).float())
        last.append(last_TH[1:].to(device).float())
        position = torch.arange(1, num + 1)
        # y of the chat's last token predicts what nobody sampled: it teaches nothing that will be asked for.
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
