"""Micro-batches by hand: padded and packed, they hold the same tokens, labels and values; and how they are planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner import packing, parallel
from slipstream.learner.batches import Batching, ByToken
from slipstream.learner.config import LearnerConfig
from slipstream.learner.packing import plan_microbatches, plan_packed_microbatches

CPU = torch.device("cpu")
SEQUENCES = [[1, 2, 3], [4, 5, 6, 7]]  # two and three predicted tokens
LOSS_STARTS = [1, 2]


def test_padded_sequences_have_a_row_each_the_longest_first() -> None:
    (batch,) = Batching(max_tokens=8).microbatches(SEQUENCES, LOSS_STARTS, CPU)
    assert batch.indices == (1, 0)
    assert batch.inputs.token_ids_BT.tolist() == [[4, 5, 6], [1, 2, 0]]
    assert batch.inputs.positions_BT.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.inputs.padding_BT is not None
    assert batch.inputs.padding_BT.tolist() == [[False, False, False], [False, False, True]]
    assert batch.labels_BT.tolist() == [[5, 6, 7], [2, 3, 0]]
    assert batch.mask_BT.tolist() == [[False, True, True], [True, True, False]]
    assert batch.repeat([8.0, 9.0]).tolist() == [[9, 9, 9], [8, 8, 0]]
    assert batch.spread([[0.5, 0.25], [2.0, 3.0]]).tolist() == [[0, 2, 3], [0.5, 0.25, 0]]


def test_a_token_takes_the_states_of_a_row_that_begins_alike() -> None:
    sequences = [[0, 5, 6, 7], [0, 5], [3, 5, 6], [0, 5, 6, 7], [0, 5, 0, 7], [0, 5, 6, 0]]
    states_of_BT = Batching(max_tokens=64, shares_prefixes=True).inputs(sequences, CPU).states_of_BT
    assert states_of_BT is not None
    # In lexicographic order: 1, 4, 5, 0, 3, 2.
    assert states_of_BT.tolist() == [
        [1, 1, 5, 0],
        [1, 1, -1, -1],
        [2, 2, 2, -1],
        [1, 1, 5, 0],
        [1, 1, 4, 4],
        [1, 1, 5, 5],
    ]


def test_packed_sequences_lie_one_behind_the_other_and_each_starts_at_position_0() -> None:
    (batch,) = Batching(max_tokens=8, packs=True).microbatches(SEQUENCES, LOSS_STARTS, CPU)
    assert batch.indices == (1, 0)
    assert batch.inputs.token_ids_BT.tolist() == [[4, 5, 6, 1, 2]]
    assert batch.inputs.positions_BT.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.inputs.padding_BT is None
    assert batch.inputs.packed is not None
    assert batch.inputs.packed.cu_seqlens_q.tolist() == [0, 3, 5]
    assert batch.inputs.packed.cu_seqlens_q.dtype is torch.int32  # as FlashAttention takes them
    assert (batch.inputs.packed.max_seqlen_q, batch.inputs.packed.max_seqlen_kv) == (3, 3)
    assert batch.labels_BT.tolist() == [[5, 6, 7, 2, 3]]
    assert batch.mask_BT.tolist() == [[False, True, True, True, True]]
    assert batch.repeat([8.0, 9.0]).tolist() == [[9, 9, 9, 8, 8]]
    assert batch.spread([[0.5, 0.25], [2.0, 3.0]]).tolist() == [[0, 2, 3, 0.5, 0.25]]


def test_what_fills_the_row_up_for_sequence_parallel_ranks_is_a_sequence_without_labels() -> None:
    (batch,) = Batching(max_tokens=8, packs=True, multiple=4).microbatches(SEQUENCES, LOSS_STARTS, CPU)
    assert batch.inputs.token_ids_BT.tolist() == [[4, 5, 6, 1, 2, 0, 0, 0]]
    assert batch.inputs.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.inputs.packed is not None
    assert batch.inputs.packed.cu_seqlens_q.tolist() == [0, 3, 5, 8]
    assert batch.inputs.num_computed_tokens == 5
    assert batch.mask_BT.tolist() == [[False, True, True, True, True, False, False, False]]
    assert batch.repeat([8.0, 9.0]).tolist() == [[9, 9, 9, 8, 8, 0, 0, 0]]


def test_values_by_token_come_back_in_the_callers_order_however_they_were_batched() -> None:
    parallel.initialize(LearnerConfig().parallel)
    for packs in (False, True):
        values = ByToken(SEQUENCES, LOSS_STARTS, CPU)
        for batch in Batching(max_tokens=8, packs=packs).microbatches(SEQUENCES, LOSS_STARTS, CPU):
            values.keep(batch.labels_BT.float(), batch)
        assert [row.tolist() for row in values.collected()] == [[2, 3], [6, 7]]


def test_neighbours_in_length_share_a_microbatch_and_packed_ones_are_few_and_about_equally_full() -> None:
    # sorted: 9 (index 1), 8 (3), 4 (0), 4 (2), 1 (4). Three at least fit 16: 9 | 8 | 4 4 1 pads to 9 + 8 + 12 tokens,
    # 9 | 8 4 | 4 1 to 9 + 16 + 8.
    assert plan_microbatches([4, 9, 4, 8, 1], max_tokens=16) == [(1,), (3,), (0, 2, 4)]
    # Together 4 x 400 = 1,600; apart 400 + 3 and the cost of one more, 300.
    assert plan_microbatches([1, 400, 1, 1], max_tokens=2000) == [(1,), (0, 2, 3)]
    # Together 4 x 100 = 400; apart 100 + 3 + 300.
    assert plan_microbatches([1, 100, 1, 1], max_tokens=2000) == [(1, 0, 2, 3)]
    # 26 tokens need two of at most 16: 9, then 8 to the other, 4 to that with 8, 4 to that with 9, 1 to that with 12.
    assert plan_packed_microbatches([4, 9, 4, 8, 1], max_tokens=16) == [(1, 2), (3, 0, 4)]
    # 24 tokens would fill two of 12, but three of 8 fit only one each.
    assert plan_packed_microbatches([8, 8, 8], max_tokens=12) == [(0,), (1,), (2,)]


def test_attention_over_like_lengths_shares_a_rectangle(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rectangle: 4 x 100; two: 2 x 100 + 2 x 9, and the cost of the second; 182 are as many."""
    for cost, expected in ((10, [(0, 2), (2, 4)]), (181, [(0, 2), (2, 4)]), (182, [(0, 4)])):
        monkeypatch.setattr(packing, "_RECTANGLE_COST", cost)
        assert packing.plan_rectangles([10, 10, 3, 2]) == expected


@pytest.mark.parametrize("plan", [plan_microbatches, plan_packed_microbatches])
@pytest.mark.parametrize("lengths", [[3, 17], [0], [4, 0]])
def test_a_sequence_that_does_not_fit_is_named(plan: Any, lengths: list[int]) -> None:
    named = rf"sequence {len(lengths) - 1} must have 1 to 16 \(max_tokens_per_microbatch\) tokens, got {lengths[-1]}"
    with pytest.raises(ValueError, match=named):
        plan(lengths, max_tokens=16)


@given(st.lists(st.integers(1, 32), min_size=1, max_size=40), st.integers(32, 128))
def test_every_sequence_is_in_one_microbatch_within_the_bound(lengths: list[int], max_tokens: int) -> None:
    padded, packed = (plan(lengths, max_tokens=max_tokens) for plan in (plan_microbatches, plan_packed_microbatches))
    for plan in (padded, packed):
        assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= max_tokens for batch in padded)
    for batch in packed:
        assert sum(lengths[index] for index in batch) <= max_tokens
        assert lengths[batch[0]] == max(lengths[index] for index in batch)
    assert len(packed) <= 2 * -(-sum(lengths) // max_tokens)  # no two of them would fit into one
