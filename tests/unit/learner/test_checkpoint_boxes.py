"""Which boxes of logical tensors a rank's numbers are; positions worked by hand on a model of two key-value heads."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner import weights
from slipstream.learner.checkpoint.boxes import Box, Patch, patches
from slipstream.learner.weights import Layout, ParameterMapping, Shard
from tests.unit.learner import test_weights

ARCH = replace(test_weights.ARCH, hidden_size=2, num_layers=1, head_dim=1, ffn_hidden_size=4)
QKV = ParameterMapping("qkv", ("q", "k", "v"), Layout.QKV)
GATE_UP = ParameterMapping("fc1", ("gate", "up"), Layout.GATE_UP)
ROW = ParameterMapping("fc2", ("down",), Layout.ROW)
COLUMN = ParameterMapping("e", ("e",), Layout.COLUMN)
NORM = ParameterMapping("n", ("n",), Layout.REPLICATED)
SHAPES = {"q": (4, 2), "k": (2, 2), "v": (2, 2), "gate": (4, 2), "up": (4, 2), "down": (2, 4), "e": (8, 2), "n": (5,)}


def test_a_flat_run_is_the_end_of_a_row_whole_rows_and_the_beginning_of_a_row() -> None:
    assert list(patches(COLUMN, (4, 3), 2, 10, ARCH, Shard())) == [
        Patch("e", (4, 3), Box((0, 2), (1, 1)), 0),
        Patch("e", (4, 3), Box((1, 0), (2, 3)), 1),
        Patch("e", (4, 3), Box((3, 0), (1, 1)), 7),
    ]


@given(
    mapping=st.sampled_from([QKV, GATE_UP, ROW, COLUMN, NORM]),
    tensor_size=st.sampled_from([1, 2]),
    cuts=st.lists(st.integers(0, 32), max_size=3),
)
def test_patches_of_all_ranks_make_whole_tensors(mapping: ParameterMapping, tensor_size: int, cuts: list[int]) -> None:
    """The same numbers as `shard_from_hf` puts into a rank's parameter, found back by patch."""
    logical = {name: torch.rand(SHAPES[name]) for name in mapping.hf}
    found = {name: torch.full(SHAPES[name], torch.nan) for name in mapping.hf}
    for rank in range(tensor_size):
        shard = Shard(tensor_rank=rank, tensor_size=tensor_size)
        local = weights._split(mapping.layout, list(logical.values()), ARCH, shard)
        ends = sorted({min(cut, local.numel()) for cut in (0, *cuts, 32)})
        for start, stop in itertools.pairwise(ends):
            run = local.flatten()[start:stop]
            for piece in patches(mapping, tuple(local.shape), start, stop, ARCH, shard):
                assert piece.whole == SHAPES[piece.name]
                own = run[piece.start : piece.start + piece.box.numel]
                origin = (0,) * len(piece.whole)
                found[piece.name][piece.box.slices(origin)] = own.view(piece.box.shape)
    assert all(torch.equal(found[name], logical[name]) for name in mapping.hf)
