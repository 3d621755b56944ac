"""Amounts of gpu-check's throughput stage, worked out by hand."""

import pytest

from slipstream.gpu_check.check_stages import Skipped
from slipstream.gpu_check.throughput import _TINY, _size


@pytest.mark.parametrize(("free_gb", "num_layers"), [(84, 8), (150, 12), (60, 4)])
def test_as_many_layers_are_trained_as_fit_and_a_small_gpu_is_left_out(free_gb: int, num_layers: int) -> None:
    """84 GB of an H100: 0.85 x 84 - 27 = 44.4, and 5.4 a layer."""
    size = _size(free_gb * 1e9)
    assert size.shape.num_layers == num_layers
    assert (size.shape.hidden_size, size.shape.ffn_hidden_size, size.vocab_size) == (4096, 12288, 151936)
    with pytest.raises(Skipped, match="needs 57 GB of free GPU memory, got 40"):
        _size(40e9)


def test_operations_are_six_a_matrix_element_and_token_and_those_of_causal_attention() -> None:
    """A layer has 64 x (2 x 64 + 2 x 32 + 3 x 128) = 36,864 elements, the output layer 512 x 64 = 32,768.

    Attention of 64 tokens costs 64 x 64 = 4,096 a layer and token in place of elements: half of 2 x 64 tokens.
    """
    assert _TINY.flops == 6 * 256 * (4 * 36_864 + 32_768 + 4 * 4_096)
