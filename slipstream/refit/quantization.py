"""Weights in 8 bits, as engines with quantized rollouts compute with them: a scale for each row of a matrix.

The matrices of the decoder's layers are quantized; embeddings, norms, biases and the output layer keep their type. The
layout is that of compressed-tensors' W8A8 checkpoints, which vLLM reads: beside each `weight` lies a `weight_scale`
[rows, 1] in float32, and their product is the matrix. An engine also rounds the inputs of these matrices, with a scale
for each token that it computes from the token itself.

One function quantizes for the learner that sends weights, for an engine that reads a directory, and for the gate. A
row's values depend on that row alone, so the same bits result wherever the function runs on the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from slipstream.refit.config import WeightFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALE = "_scale"
"""Added to the name of a matrix, the name of its scales."""

LOAD_FORMAT = "slipstream-quantized"
"""Name under which vLLM knows the loader that quantizes."""

_MATRICES = tuple(f".{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def is_quantized(name: str) -> bool:
    """Return True if a checkpoint's tensor of this name is sent in 8 bits."""
    return name.startswith("model.layers.") and name.endswith(_MATRICES)


def quantized(weights: Iterable[tuple[str, Tensor]], to: WeightFormat) -> Iterator[tuple[str, Tensor]]:
    """Quantize the matrices among a checkpoint's tensors; those that have 8 bits already, and all others, stay."""
    for name, tensor in weights:
        if is_quantized(name) and tensor.dtype.itemsize > 1:
            values, scale = quantize(tensor, to)
            yield name, values
            yield name + SCALE, scale
        else:
            yield name, tensor


def quantize(matrix: Tensor, to: WeightFormat) -> tuple[Tensor, Tensor]:
    """Round a matrix [rows, columns] to 8 bits; returns the values, and the scales [rows, 1] in float32.

    A row's largest magnitude becomes `to.largest`. A row with NaN or Inf has such a scale, and a row of zeros the
    scale 1. Of the least numbers in float32 a scale is rounded so far that the largest value would pass `to.largest`.
    """
    return _rounded(matrix.float(), to, to.largest)


def restored(matrix: Tensor, to: WeightFormat) -> Tensor:
    """Round a matrix to 8 bits and return what it then stands for, in float32, as 16 bits would round it again."""
    values, scale = quantize(matrix, to)
    return values.float() * scale


def rounded_input(states: Tensor, to: WeightFormat, *, num_slices: int = 1) -> Tensor:
    """Round states [..., columns] as an engine rounds the input of a quantized matrix, in their own type.

    Args:
        num_slices: ranks of the engine that each round a slice of the columns with a scale of its own.
    """
    slices = states.float().unflatten(-1, (num_slices, -1))
    values, scale = _rounded(slices, to, to.largest_input)
    return (values.float() * scale).flatten(-2).to(states.dtype)


def _rounded(values: Tensor, to: WeightFormat, largest: float) -> tuple[Tensor, Tensor]:
    import torch

    most = values.abs().amax(-1, keepdim=True)
    scale = most / largest
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = values / scale
    dtype: torch.dtype = getattr(torch, to.dtype)
    return (scaled if dtype.is_floating_point else scaled.round()).clamp(-largest, largest).to(dtype), scale


def checkpoint_config(to: WeightFormat) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint in this format, for its `config.json`."""
    numbers = {"num_bits": 8, "type": "float" if to.dtype.startswith("float") else "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if numbers["type"] == "float" else "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
    }
