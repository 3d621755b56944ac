"""Micro-batches of token sequences: padded to one row each, or packed one behind the other into a single row.

Legend: `B` rows of a micro-batch, `T` predicted tokens: inputs are positions 0 .. T-1, labels positions 1 .. T. `L`
layers, `K` experts a token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from slipstream.learner import packing, parallel

Sequences = Sequence[Sequence[int]]
Values = Sequence[float] | NDArray[np.float32]
Routes = Sequence[NDArray[np.integer]]
"""Experts [T, L, K] of each sequence's inputs; empty leaves the choice to the model's routers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Inputs of the model."""

    token_ids_BT: Tensor
    positions_BT: Tensor  # 0, 1, … within each sequence
    padding_BT: Tensor | None  # True where there is no token; None: the sequences are packed
    # Row whose states a token takes, as the tokens up to it are the same there; -1: no token. None: each its own.
    states_of_BT: Tensor | None = None
    packed: PackedSeqParams | None  # start and end of each sequence in the single row
    places: tuple[tuple[int, slice], ...]  # row and columns of each sequence
    routes_LTBK: Tensor | None = None  # experts of each input, any different ones for padding; None: routers choose

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens that the layers compute, without padding."""
        if self.states_of_BT is None:
            return sum(columns.stop - columns.start for _, columns in self.places)
        return int((self.states_of_BT == torch.arange(len(self.states_of_BT))[:, None]).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Inputs and labels of some of the caller's sequences; an idle micro-batch has no sequence and no label."""

    indices: tuple[int, ...]  # indices of the caller's sequences, in the order of `inputs.places`; empty if idle
    inputs: Inputs
    labels_BT: Tensor
    mask_BT: Tensor  # True where the label enters the loss

    def spread(self, values: Sequence[Values]) -> Tensor:
        """Scatter `values`, one number a label that counts, to [B, T] float32; 0 elsewhere."""
        mine = np.concatenate([np.asarray(values[index], dtype=np.float32) for index in self.indices])
        spread_BT = torch.zeros(self.mask_BT.shape, device=self.mask_BT.device)
        spread_BT[self.mask_BT] = torch.from_numpy(mine).to(self.mask_BT.device)
        return spread_BT

    def repeat(self, values: Sequence[float]) -> Tensor:
        """Repeat one value a sequence over its columns, [B, T] float32; 0 elsewhere."""
        repeated_BT = np.zeros(tuple(self.mask_BT.shape), dtype=np.float32)
        for index, place in zip(self.indices, self.inputs.places, strict=True):
            repeated_BT[place] = values[index]
        return torch.from_numpy(repeated_BT).to(self.mask_BT.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """Rules that combine sequences into micro-batches.

    Attributes:
        multiple: T is padded to a multiple of this number, because sequence and context parallelism split the inputs
            evenly over ranks; this padding is not part of `max_tokens`.
        shares_prefixes: the layers skip padding, and compute tokens once that several sequences begin with.
    """

    max_tokens: int
    packs: bool = False
    shares_prefixes: bool = False
    multiple: int = 1

    def inputs(self, sequences: Sequences, device: torch.device) -> Inputs:
        """Build the model's inputs from every token of some sequences."""
        lengths = [len(tokens) for tokens in sequences]
        return self._packed(sequences, lengths, device) if self.packs else self._padded(sequences, lengths, device)

    def microbatches(
        self, sequences: Sequences, loss_starts: Sequence[int] | None, device: torch.device, routes: Routes = ()
    ) -> list[MicroBatch]:
        """Split sequences into micro-batches.

        Args:
            loss_starts: index of each sequence's first token that counts as a label; None: every token is an input, and
                no label counts.
            routes: experts that replace those of the model's own routers.
        """
        lengths = [len(tokens) for tokens in sequences]
        if self.packs:
            plan = packing.plan_packed_microbatches(lengths, max_tokens=self.max_tokens)
        else:
            cost = packing.UNPADDED_MICROBATCH_COST if self.shares_prefixes else packing.MICROBATCH_COST
            plan = packing.plan_microbatches(lengths, max_tokens=self.max_tokens, microbatch_cost=cost)
        batches = [self._microbatch(sequences, loss_starts, indices, device) for indices in plan]
        return [_routed(batch, routes) for batch in batches] if len(routes) else batches

    def _microbatch(
        self, sequences: Sequences, loss_starts: Sequence[int] | None, indices: tuple[int, ...], device: torch.device
    ) -> MicroBatch:
        chosen = [sequences[index] if loss_starts is None else sequences[index][:-1] for index in indices]
        inputs = self.inputs(chosen, device)
        labels_BT = np.zeros(tuple(inputs.token_ids_BT.shape), dtype=np.int64)
        mask_BT = np.zeros(labels_BT.shape, dtype=bool)
        if loss_starts is not None:
            for index, (row, columns) in zip(indices, inputs.places, strict=True):
                labels_BT[row, columns] = sequences[index][1:]
                mask_BT[row, columns.start + loss_starts[index] - 1 : columns.stop] = True
        labels, mask = torch.from_numpy(labels_BT).to(device), torch.from_numpy(mask_BT).to(device)
        return MicroBatch(indices=indices, inputs=inputs, labels_BT=labels, mask_BT=mask)

    def _padded(self, sequences: Sequences, lengths: Sequence[int], device: torch.device) -> Inputs:
        token_ids_BT = np.zeros((len(lengths), self._width(max(lengths))), dtype=np.int64)
        for row, tokens in enumerate(sequences):
            token_ids_BT[row, : len(tokens)] = tokens
        columns_T = np.arange(token_ids_BT.shape[1])
        padding_BT = columns_T >= np.array(lengths)[:, None]
        states_of_BT = torch.from_numpy(_states_of(token_ids_BT, padding_BT)) if self.shares_prefixes else None
        return Inputs(
            token_ids_BT=torch.from_numpy(token_ids_BT).to(device),
            positions_BT=torch.from_numpy(columns_T).to(device).expand(token_ids_BT.shape),
            padding_BT=torch.from_numpy(padding_BT).to(device),
            states_of_BT=states_of_BT,
            packed=None,
            places=tuple((row, slice(0, length)) for row, length in enumerate(lengths)),
        )

    def _packed(self, sequences: Sequences, lengths: Sequence[int], device: torch.device) -> Inputs:
        rest = self._width(sum(lengths)) - sum(lengths)  # padding is a sequence of its own, which has no place
        all_lengths = [*lengths, rest] if rest else list(lengths)
        ends = np.cumsum(all_lengths)
        starts = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        longest = max(all_lengths)
        token_ids_P = np.concatenate([*sequences, [0] * rest]).astype(np.int64)
        positions_P = np.concatenate([np.arange(length) for length in all_lengths])
        return Inputs(
            token_ids_BT=torch.from_numpy(token_ids_P)[None].to(device),
            positions_BT=torch.from_numpy(positions_P)[None].to(device),
            padding_BT=None,
            packed=PackedSeqParams(
                cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
            ),
            places=tuple((0, slice(end - length, end)) for end, length in zip(ends.tolist(), lengths, strict=False)),
        )

    def _width(self, num_tokens: int) -> int:
        return -(-num_tokens // self.multiple) * self.multiple


def _states_of(token_ids_BT: NDArray[np.int64], padding_BT: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Find `Inputs.states_of_BT`. No other row shares as long a prefix as a neighbour in lexicographic order."""
    tokens_BT = np.where(padding_BT, -1, token_ids_BT)
    rows_BT = np.where(padding_BT, -1, np.arange(len(tokens_BT))[:, None])
    for before, row in itertools.pairwise(np.lexsort(tokens_BT.T[::-1])):
        is_shared_T = np.logical_and.accumulate(tokens_BT[before] == tokens_BT[row]) & ~padding_BT[row]
        rows_BT[row, is_shared_T] = rows_BT[before, is_shared_T]
    return rows_BT


def _routed(batch: MicroBatch, routes: Routes) -> MicroBatch:
    """Add the experts of a micro-batch's sequences, which need one row for each of their inputs."""
    layers, experts = routes[0].shape[1:]
    width = batch.labels_BT.shape[::-1]
    routes_TBLK = np.broadcast_to(np.arange(experts), (*width, layers, experts)).copy()
    for index, (row, columns) in zip(batch.indices, batch.inputs.places, strict=True):
        wanted = (columns.stop - columns.start, layers, experts)
        if routes[index].shape != wanted:
            raise ValueError(f"routes of sequence {index} must have the shape {wanted}, got {routes[index].shape}")
        routes_TBLK[columns, row] = routes[index]
    routes_LTBK = torch.from_numpy(routes_TBLK).permute(2, 0, 1, 3).to(batch.labels_BT.device)
    return dataclasses.replace(batch, inputs=dataclasses.replace(batch.inputs, routes_LTBK=routes_LTBK))


class ByToken:
    """One number a label that counts, collected over micro-batches."""

    def __init__(self, sequences: Sequences, loss_starts: Sequence[int], device: torch.device) -> None:
        self._offsets = np.cumsum([0, *label_counts(sequences, loss_starts)])
        self._values_N = torch.zeros(int(self._offsets[-1]), device=device)

    def keep(self, values_BT: Tensor, batch: MicroBatch) -> None:
        """Store the numbers of one micro-batch."""
        for index, place in zip(batch.indices, batch.inputs.places, strict=True):
            start, end = self._offsets[index : index + 2]
            self._values_N[start:end] = values_BT[place][batch.mask_BT[place]]

    def collected(self) -> list[NDArray[np.float32]]:
        """Return one array a sequence, in the caller's order, on every pipeline stage."""
        values_N = parallel.sum_over_stages(self._values_N).cpu().numpy()
        return [values_N[start:end] for start, end in itertools.pairwise(self._offsets)]


def forward(model: torch.nn.Module, inputs: Inputs) -> Tensor:
    """Compute the hidden states [T, B, H] of this pipeline stage and of this context-parallel rank's tokens."""
    padding_BT = inputs.padding_BT if inputs.states_of_BT is None else inputs.states_of_BT
    return model(
        input_ids=parallel.context_part(inputs.token_ids_BT, 1),
        position_ids=parallel.context_part(inputs.positions_BT, 1),
        attention_mask=None,
        packed_seq_params=inputs.packed,  # of all tokens, as context-parallel attention sees them
        padding_mask=None if padding_BT is None else parallel.context_part(padding_BT, 1),
    )


def idle_microbatch(device: torch.device, routes_L11K: Tensor | None = None) -> MicroBatch:
    """Build a micro-batch of one token, for a rank that joins the collectives of a layer of experts without data."""
    inputs = Batching(max_tokens=1).inputs([[0]], device)
    is_none_11 = torch.zeros(1, 1, dtype=torch.bool, device=device)
    inputs = dataclasses.replace(inputs, places=(), routes_LTBK=routes_L11K)
    return MicroBatch(indices=(), inputs=inputs, labels_BT=inputs.token_ids_BT, mask_BT=is_none_11)


def label_counts(sequences: Sequences, loss_starts: Sequence[int]) -> list[int]:
    """Count the labels of each sequence that enter the loss.

    Raises:
        ValueError: a sequence has no label, or no token precedes its first label.
    """
    for index, (tokens, start) in enumerate(zip(sequences, loss_starts, strict=True)):
        if not 1 <= start < len(tokens):
            raise ValueError(f"sequence {index} must have a prompt and a response, got {start} of {len(tokens)} tokens")
    return [len(tokens) - start for tokens, start in zip(sequences, loss_starts, strict=True)]
