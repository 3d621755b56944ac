"""Rows of different lengths in two arrays."""

import pickle

import numpy as np
import pytest

from slipstream.ragged import Ragged


def test_rows_come_back_in_order_as_views_of_one_array_which_a_pickle_holds_once() -> None:
    ragged = Ragged.of([(5, 6, 7), (), (8,)], np.int32)
    assert ragged.values.tolist() == [5, 6, 7, 8]
    assert [row.tolist() for row in ragged] == [[5, 6, 7], [], [8]]
    assert (len(ragged), ragged[-1].tolist(), ragged[0].dtype) == (3, [8], np.int32)
    assert [row.tolist() for row in ragged[1:]] == [[], [8]]
    assert ragged[0].base is ragged.values
    with pytest.raises(IndexError):
        ragged[3]
    assert list(Ragged.of([], np.float32)) == []
    ragged = Ragged.of([range(1000)] * 10, np.int32)
    assert len(pickle.dumps(ragged)) < 1.1 * ragged.values.nbytes
    assert [row.tolist() for row in pickle.loads(pickle.dumps(ragged))] == [list(range(1000))] * 10
