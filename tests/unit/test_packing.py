"""Micro-batch and row plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data import packing
from slipstream.policy.packing import PADDING_DOCUMENT, pack_documents, plan_microbatches, plan_rows

LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=40)


def test_neighbours_in_length_share_a_microbatch() -> None:
    # sorted: 9 (index 1), 8 (3), 4 (0), 4 (2), 1 (4). Three at least fit 16: 9 | 8 | 4 4 1 pads to 9 + 8 + 12 tokens,
    # 9 | 8 4 | 4 1 to 9 + 16 + 8.
    assert plan_microbatches([4, 9, 4, 8, 1], max_tokens=16) == [(1,), (3,), (0, 2, 4)]


def test_another_microbatch_is_worth_it_when_it_saves_more_padding_than_it_costs() -> None:
    # Together 4 x 400 = 1,600; apart 400 + 3 and the cost of one more, 300.
    assert plan_microbatches([1, 400, 1, 1], max_tokens=2000) == [(1,), (0, 2, 3)]
    # Together 4 x 100 = 400; apart 100 + 3 + 300.
    assert plan_microbatches([1, 100, 1, 1], max_tokens=2000) == [(1, 0, 2, 3)]


def test_documents_go_into_the_first_row_with_room() -> None:
    # rows of 10: 6 | 5 opens a second | 4 fits the first | 5 fits the second | 1 opens a third
    assert plan_rows([6, 5, 4, 5, 1], row_length=10) == [(0, 2), (1, 3), (4,)]


def test_packed_rows_hold_tokens_document_ids_and_padding() -> None:
    packed = pack_documents([[7, 8, 9], [5, 6], [4]], row_length=4, pad_id=0)
    assert packed.token_ids_RL.tolist() == [[7, 8, 9, 4], [5, 6, 0, 0]]
    assert packed.document_ids_RL.tolist() == [[0, 0, 0, 2], [1, 1, PADDING_DOCUMENT, PADDING_DOCUMENT]]
    assert packed.documents == ((0, 2), (1,))


def test_attention_over_like_lengths_shares_a_rectangle(monkeypatch: pytest.MonkeyPatch) -> None:
    # One rectangle: 4 x 100; two: 2 x 100 + 2 x 9, and 10 more for the second.
    monkeypatch.setattr(packing, "_RECTANGLE_COST", 10)
    assert packing.plan_rectangles([10, 10, 3, 2]) == [(0, 2), (2, 4)]
    # 1 x 9 + 1 x 4 and 10 more would cost more than 2 x 9.
    monkeypatch.setattr(packing, "_RECTANGLE_COST", 181)
    assert packing.plan_rectangles([10, 10, 3, 2]) == [(0, 2), (2, 4)]
    monkeypatch.setattr(packing, "_RECTANGLE_COST", 182)
    assert packing.plan_rectangles([10, 10, 3, 2]) == [(0, 4)]


@pytest.mark.parametrize("lengths", [[3, 17], [0]])
def test_a_sequence_that_does_not_fit_is_named(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"sequence {len(lengths) - 1} must have 1 to 16 .* got {lengths[-1]}"):
        plan_microbatches(lengths, max_tokens=16)


@given(LENGTHS, st.integers(32, 128))
def test_every_sequence_is_in_one_microbatch_within_the_bound(lengths: list[int], max_tokens: int) -> None:
    plan = plan_microbatches(lengths, max_tokens=max_tokens)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= max_tokens for batch in plan)


@given(LENGTHS)
def test_packing_loses_no_token(lengths: list[int]) -> None:
    documents = [[index + 1] * length for index, length in enumerate(lengths)]
    packed = pack_documents(documents, row_length=32)
    for index, document in enumerate(documents):
        assert packed.token_ids_RL[packed.document_ids_RL == index].tolist() == document
    assert np.all(packed.token_ids_RL[packed.document_ids_RL == PADDING_DOCUMENT] == 0)
