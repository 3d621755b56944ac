"""Policy that computes as engines with quantized rollouts do: the judge of their certificate.

The matrices of its layers are those that the engines multiply with, and so are the inputs of these matrices, up to the
rounding of float32. Where a number lies on the border of two 8-bit values, that rounding chooses between them, in the
judge as in an engine whose batch is another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from slipstream.learner.cpu.layer import CpuTransformerLayer
from slipstream.refit.config import WeightFormat
from slipstream.refit.quantization import is_quantized, restored, rounded_input

_SPLIT_BY_ROWS, _SPLIT_BY_COLUMNS = ("linear_qkv", "linear_fc1"), ("linear_proj", "linear_fc2")


def rounded_weights(read: Callable[[str], Tensor], to: WeightFormat) -> Callable[[str], Tensor]:
    """Read a checkpoint's tensors by name, the quantized ones as what their 8 bits stand for."""

    def rounded(name: str) -> Tensor:
        tensor = read(name)
        return restored(tensor, to) if is_quantized(name) else tensor

    return rounded


def round_inputs(model: nn.Module, to: WeightFormat, *, num_ranks: int) -> None:
    """Round the inputs of the layers' matrices as an engine does that is split over `to.num_ranks` ranks.

    The tensor-parallel ranks of this model, `num_ranks`, divide those of the engine.
    """
    assert to.num_ranks % num_ranks == 0, "the recipe refuses it"
    num_slices = to.num_ranks // num_ranks
    for name, module in model.named_modules():
        assert not isinstance(module, CpuTransformerLayer), "it calls no linear: a judge packs its sequences"
        kind = name.rpartition(".")[2]
        if kind in _SPLIT_BY_ROWS + _SPLIT_BY_COLUMNS:
            own = num_slices if kind in _SPLIT_BY_COLUMNS else 1
            module.register_forward_pre_hook(partial(_rounded, to=to, num_slices=own))


def _rounded(module: nn.Module, inputs: tuple[Any, ...], *, to: WeightFormat, num_slices: int) -> tuple[Any, ...]:
    return (rounded_input(inputs[0], to, num_slices=num_slices), *inputs[1:])
