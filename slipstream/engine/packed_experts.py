"""The experts of a vLLM layer on a CPU, which keeps them in the order that its kernel reads.

vLLM packs a layer's experts when it first loads them, and not when it reloads: its own reload would leave them in the
checkpoint's order for a kernel that takes it for the packed one, and say nothing. So they are written here, packed
anew. Packing moves numbers and computes none; where it moves them is found by packing their indices, so experts are
read exactly, in whatever order.

Legend: `E` experts, `H` hidden size, `F` width of an expert, `P` the same padded to what the kernel takes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from slipstream.refit.fingerprint import WeightPart

_GATE_UP, _DOWN = "w13_weight", "w2_weight"
_INTEGERS = {2: torch.int16, 4: torch.int32}


def are_on_cpu(module: nn.Module) -> bool:
    """Whether the module holds experts in the order of a CPU's kernel."""
    return isinstance(module, RoutedExperts) and isinstance(_kernel(module), CPUUnquantizedExperts)


def expert_parts(path: str, module: RoutedExperts, own: dict[str, nn.Parameter]) -> dict[str, tuple[WeightPart, ...]]:
    """The checkpoint's tensors in each parameter, one below the other.

    Raises:
        LookupError: experts that this module does not know: split, quantized, with a bias, or another device's.
    """
    config, kernel = module.moe_config, _kernel(module)
    is_whole = module.local_num_experts == module.global_num_experts and config.tp_size == 1
    if not are_on_cpu(module) or kernel._use_zentorch or set(own) != {_GATE_UP, _DOWN} or not is_whole:
        raise LookupError(f"{path} holds {sorted(own)} in an order that only vLLM knows")
    name = path.removesuffix(".routed_experts")
    dtype = str(own[_DOWN].dtype).removeprefix("torch.")

    def part(expert: int, projection: str, length: int) -> WeightPart:
        return WeightPart(name=f"{name}.{expert}.{projection}.weight", dim=0, start=0, length=length, dtype=dtype)

    experts, width = range(module.global_num_experts), _width(module)
    return {
        _GATE_UP: tuple(part(expert, each, width) for expert in experts for each in ("gate_proj", "up_proj")),
        _DOWN: tuple(part(expert, "down_proj", module.hidden_size) for expert in experts),
    }


def read_experts(module: RoutedExperts, parameter: str) -> Tensor:
    """[rows of all experts, columns] in the checkpoint's order: [E * 2 F, H] of gate and up, [E * H, F] of down."""
    packed: Tensor = getattr(module, parameter).detach()
    order = _order(packed.shape[1], packed.shape[2], packed.dtype, _kernel(module).isa)
    plain = torch.empty_like(packed).flatten(1)
    plain[:, order] = packed.flatten(1)
    width = _width(module)
    if parameter == _DOWN:
        return plain.view(packed.shape)[..., :width].flatten(0, 1)
    return plain.view(len(packed), 2, -1, packed.shape[2])[:, :, :width].flatten(0, 2)


def write_experts(module: RoutedExperts, parameter: str, rows: Tensor) -> None:
    """The inverse of `read_experts`."""
    packed: Tensor = getattr(module, parameter).data
    plain, width = torch.zeros_like(packed), _width(module)
    if parameter == _DOWN:
        plain[..., :width] = rows.view(len(packed), -1, width)
    else:
        halves_E2PH = plain.view(len(packed), 2, -1, packed.shape[2])
        halves_E2PH[:, :, :width] = rows.view(len(packed), 2, width, -1)
    packed.copy_(cpu_prepack_moe_weight(plain, _kernel(module).isa))


def _kernel(module: RoutedExperts) -> Any:
    kernel: Any = module.quant_method.moe_kernel
    return None if kernel is None else kernel.fused_experts


def _width(module: RoutedExperts) -> int:
    width = module.moe_config.intermediate_size_per_partition_unpadded
    assert width is not None
    return width


@cache
def _order(num_rows: int, num_columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """[rows * columns]: the index in an expert's matrix of each number of its packed form.

    Indices are packed as the bits of numbers: of 16 bits, in two halves.
    """
    bits = 8 * dtype.itemsize
    indices = torch.arange(num_rows * num_columns)
    order = torch.zeros_like(indices)
    for shift in range(0, 32, bits):
        half = (indices >> shift).to(_INTEGERS[dtype.itemsize]).view(dtype).view(1, num_rows, num_columns)
        packed = cpu_prepack_moe_weight(half, isa).view(_INTEGERS[dtype.itemsize]).flatten().long()
        order += (packed & ((1 << bits) - 1)) << shift
    assert torch.equal(order.sort().values, indices), "packing must move numbers, and change none"
    return order
