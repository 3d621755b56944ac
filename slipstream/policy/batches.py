"""Token sequences as padded micro-batches of tensors.

Legend: `B` sequences of a micro-batch, `T` predicted tokens: inputs are positions 0 .. T-1, labels positions 1 .. T.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.policy import collectives
from slipstream.policy.packing import MICROBATCH_COST, plan_microbatches

Sequences = Sequence[Sequence[int]]
Values = Sequence[float] | NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Some of the caller's sequences, padded on the right to the longest; of an idle one nothing counts."""

    indices: tuple[int, ...]  # B, into the caller's sequences; none if it is idle
    token_ids_BT: Tensor
    labels_BT: Tensor
    mask_BT: Tensor  # True where the label counts
    padding_BT: Tensor  # True where the input is none

    def spread(self, values: Sequence[Values]) -> Tensor:
        """[B, T] float32 holding each sequence's `values` at its labels that count, 0 elsewhere."""
        mine = np.concatenate([np.asarray(values[index], dtype=np.float32) for index in self.indices])
        spread_BT = torch.zeros(self.mask_BT.shape, device=self.mask_BT.device)
        spread_BT[self.mask_BT] = torch.from_numpy(mine).to(self.mask_BT.device)
        return spread_BT


class ByToken:
    """One number a label that counts, gathered from micro-batches."""

    def __init__(self, sequences: Sequences, loss_starts: Sequence[int], device: torch.device) -> None:
        self._values_N = torch.zeros(num_labels(sequences, loss_starts), device=device)
        lengths = [len(tokens) - start for tokens, start in zip(sequences, loss_starts, strict=True)]
        self._offsets = np.cumsum([0, *lengths])

    def keep(self, values_BT: Tensor, batch: MicroBatch) -> None:
        """Take those of one micro-batch."""
        for row, index in enumerate(batch.indices):
            start, end = self._offsets[index : index + 2]
            self._values_N[start:end] = values_BT[row][batch.mask_BT[row]]

    def collected(self) -> list[NDArray[np.float32]]:
        """One array a sequence, in the caller's order, on every stage of the pipeline."""
        values_N = collectives.from_last_stage(self._values_N).cpu().numpy()
        return [values_N[start:end] for start, end in itertools.pairwise(self._offsets)]


def microbatches(
    sequences: Sequences,
    loss_starts: Sequence[int],
    *,
    max_tokens: int,
    device: torch.device,
    microbatch_cost: int = MICROBATCH_COST,
    multiple: int = 1,
) -> list[MicroBatch]:
    """Cut the sequences into micro-batches; labels count from each sequence's `loss_starts` on.

    Args:
        microbatch_cost: see `plan_microbatches`.
        multiple: of which T is made one, for sequence parallelism, which splits the inputs evenly over ranks; this
            padding is not part of `max_tokens`.
    """
    lengths = [len(tokens) for tokens in sequences]
    batches = []
    for indices in plan_microbatches(lengths, max_tokens=max_tokens, microbatch_cost=microbatch_cost):
        inputs = lengths[indices[0]] - 1  # the longest comes first
        width = -(-inputs // multiple) * multiple + 1
        tokens = pad([sequences[index] for index in indices], device, width=width)
        at = torch.arange(1, tokens.shape[1], device=device)
        start_B1 = torch.tensor([[loss_starts[index]] for index in indices], device=device)
        end_B1 = torch.tensor([[lengths[index]] for index in indices], device=device)
        batches.append(
            MicroBatch(
                indices=indices,
                token_ids_BT=tokens[:, :-1],
                labels_BT=tokens[:, 1:].contiguous(),
                mask_BT=(at >= start_B1) & (at < end_B1),
                padding_BT=padding([lengths[index] - 1 for index in indices], tokens.shape[1] - 1, device),
            )
        )
    return batches


def idle_microbatch(device: torch.device) -> MicroBatch:
    """One token, with which a rank takes part in what others compute of theirs."""
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
    is_none_11 = torch.zeros(1, 1, dtype=torch.bool, device=device)
    return MicroBatch(indices=(), token_ids_BT=token_11, labels_BT=token_11, mask_BT=is_none_11, padding_BT=is_none_11)


def num_labels(sequences: Sequences, loss_starts: Sequence[int]) -> int:
    """Labels that count, over all sequences.

    Raises:
        ValueError: a sequence has no label, or a first one that no token precedes.
    """
    for index, (tokens, start) in enumerate(zip(sequences, loss_starts, strict=True)):
        if not 1 <= start < len(tokens):
            raise ValueError(f"sequence {index} must have a prompt and a response, got {start} of {len(tokens)} tokens")
    return sum(len(tokens) - start for tokens, start in zip(sequences, loss_starts, strict=True))


def pad(sequences: Sequences, device: torch.device, *, width: int) -> Tensor:
    """[B, width], padded on the right with id 0, which no real token attends to."""
    padded = np.zeros((len(sequences), width), dtype=np.int64)
    for row, tokens in enumerate(sequences):
        padded[row, : len(tokens)] = tokens
    return torch.from_numpy(padded).to(device)


def padding(lengths: Sequence[int], width: int, device: torch.device) -> Tensor:
    """[B, width], True behind each row's first `lengths` entries."""
    return torch.arange(width, device=device) >= torch.tensor(lengths, device=device).unsqueeze(1)


def positions(token_ids_BT: Tensor) -> Tensor:
    """[B, T], each row 0 .. T-1."""
    return torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device).expand_as(token_ids_BT)
