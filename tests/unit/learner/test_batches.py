"""Micro-batches by hand: padded and packed, they hold the same tokens, labels and values."""

from __future__ import annotations

import torch

from slipstream.learner import parallel
from slipstream.learner.batches import Batching, ByToken
from slipstream.learner.config import LearnerConfig

CPU = torch.device("cpu")
SEQUENCES = [[1, 2, 3], [4, 5, 6, 7]]  # two and three predicted tokens
LOSS_STARTS = [1, 2]


def _values(tensor: torch.Tensor) -> list[list[float]]:
    return tensor.tolist()


def test_padded_sequences_have_a_row_each_the_longest_first() -> None:
    (batch,) = Batching(max_tokens=8).microbatches(SEQUENCES, LOSS_STARTS, CPU)
    assert batch.indices == (1, 0)
    assert _values(batch.inputs.token_ids_BT) == [[4, 5, 6], [1, 2, 0]]
    assert _values(batch.inputs.positions_BT) == [[0, 1, 2], [0, 1, 2]]
    assert batch.inputs.padding_BT is not None
    assert _values(batch.inputs.padding_BT) == [[False, False, False], [False, False, True]]
    assert _values(batch.labels_BT) == [[5, 6, 7], [2, 3, 0]]
    assert _values(batch.mask_BT) == [[False, True, True], [True, True, False]]
    assert _values(batch.repeat([8.0, 9.0])) == [[9, 9, 9], [8, 8, 0]]
    assert _values(batch.spread([[0.5, 0.25], [2.0, 3.0]])) == [[0, 2, 3], [0.5, 0.25, 0]]


def test_packed_sequences_lie_one_behind_the_other_and_each_starts_at_position_0() -> None:
    (batch,) = Batching(max_tokens=8, packs=True).microbatches(SEQUENCES, LOSS_STARTS, CPU)
    assert batch.indices == (1, 0)
    assert _values(batch.inputs.token_ids_BT) == [[4, 5, 6, 1, 2]]
    assert _values(batch.inputs.positions_BT) == [[0, 1, 2, 0, 1]]
    assert batch.inputs.padding_BT is None
    assert batch.inputs.packed is not None
    assert batch.inputs.packed.cu_seqlens_q.tolist() == [0, 3, 5]
    assert batch.inputs.packed.cu_seqlens_q.dtype is torch.int32  # as FlashAttention takes them
    assert (batch.inputs.packed.max_seqlen_q, batch.inputs.packed.max_seqlen_kv) == (3, 3)
    assert _values(batch.labels_BT) == [[5, 6, 7, 2, 3]]
    assert _values(batch.mask_BT) == [[False, True, True, True, True]]
    assert _values(batch.repeat([8.0, 9.0])) == [[9, 9, 9, 8, 8]]
    assert _values(batch.spread([[0.5, 0.25], [2.0, 3.0]])) == [[0, 2, 3, 0.5, 0.25]]


def test_what_fills_the_row_up_for_sequence_parallel_ranks_is_a_sequence_without_labels() -> None:
    (batch,) = Batching(max_tokens=8, packs=True, multiple=4).microbatches(SEQUENCES, LOSS_STARTS, CPU)
    assert _values(batch.inputs.token_ids_BT) == [[4, 5, 6, 1, 2, 0, 0, 0]]
    assert _values(batch.inputs.positions_BT) == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.inputs.packed is not None
    assert batch.inputs.packed.cu_seqlens_q.tolist() == [0, 3, 5, 8]
    assert _values(batch.mask_BT) == [[False, True, True, True, True, False, False, False]]
    assert _values(batch.repeat([8.0, 9.0])) == [[9, 9, 9, 8, 8, 0, 0, 0]]


def test_values_by_token_come_back_in_the_callers_order_however_they_were_batched() -> None:
    parallel.initialize(LearnerConfig().parallel)
    for packs in (False, True):
        values = ByToken(SEQUENCES, LOSS_STARTS, CPU)
        for batch in Batching(max_tokens=8, packs=packs).microbatches(SEQUENCES, LOSS_STARTS, CPU):
            values.keep(batch.labels_BT.float(), batch)
        assert [row.tolist() for row in values.collected()] == [[2, 3], [6, 7]]
