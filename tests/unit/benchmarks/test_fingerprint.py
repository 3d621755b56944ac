"""The fingerprint benchmark on tensors of a few rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fingerprint import Timing, layer, timings


def test_a_layer_is_cut_by_rows_to_what_fits() -> None:
    cut, whole = layer(0.001), layer(2**-8)
    assert cut["mlp.down_proj"].shape == (5, 12288)  # 4,096 rows of 0.72 GiB: one in 736 fits
    assert sum(tensor.nbytes for tensor in cut.values()) <= 0.001 * 2**30
    assert whole["self_attn.q_norm"].shape == (1,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_ways_are_timed_over_the_same_bytes(dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in layer(0.001).items()}
    ours, other = timings(tensors)
    name = str(dtype).removeprefix("torch.")
    assert (ours.label, other.label) == (f"additive fingerprint, {name} on cpu", f"XXH3, {name} on cpu")
    assert ours.num_bytes == other.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < ours.seconds < 60


def test_a_line_gives_the_rate() -> None:
    assert Timing(label="x", num_bytes=3_000_000_000, seconds=2.0).line().split() == ["x", "1.50", "GB/s"]
