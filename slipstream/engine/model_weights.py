"""The weights that a vLLM model really computes with, whatever layout it keeps them in: read, and on a CPU written.

Fused layers are cut into the checkpoint's tensors, tensor-parallel shards are named by the slice they hold, and
weights that a CPU backend has packed out of sight are recovered by multiplying with the identity, which is exact:
every sum has one term. Experts are read and written by `packed_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from slipstream.engine.packed_experts import are_on_cpu, expert_parts, read_experts, write_experts
from slipstream.refit.fingerprint import HeldWeights, WeightPart

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_RENAMED = {"draft_id_to_target_id": "d2t"}  # of the model itself: by vLLM's EAGLE-3 drafts, when they load


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One parameter of a vLLM model, and the checkpoint's parts that lie in it one below the other."""

    module: nn.Module
    parameter: str
    parts: tuple[WeightPart, ...]
    shape: tuple[int, int] | None = None  # [outputs, inputs] of a layer that multiplies; None of others

    def read(self) -> HeldWeights:
        """The parts as the model computes with them, without what pads them.

        Raises:
            LookupError: the backend hides them.
            RuntimeError: a layer multiplies with another weight than it holds.
        """
        held: Tensor = getattr(self.module, self.parameter)
        if isinstance(self.module, RoutedExperts):
            held = read_experts(self.module, self.parameter)
        if self.shape is not None and hasattr(self.module, "cpu_linear"):
            packed = self._recovered(self.shape[1])
            if held.numel() and not torch.equal(held, packed):
                raise RuntimeError(f"{self.parts[0].name} must be what its layer multiplies with, got another weight")
            held = packed
        if not held.numel():
            raise LookupError(f"{self.parts[0].name} is empty: its backend hides it")
        if self.parts[0].dim == 1:
            return HeldWeights(tensor=held, parts=self.parts, split=lambda rows: [rows])
        lengths = [part.length for part in self.parts]
        return HeldWeights(tensor=held[: sum(lengths)], parts=self.parts, split=lambda rows: rows.split(lengths))

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the parameter by whole tensors of a checkpoint, and have a layer that packs it do so anew."""
        cuts = [tensors[part.name].narrow(part.dim, part.start, part.length) for part in self.parts]
        rows = cuts[0] if len(cuts) == 1 else torch.cat(cuts)
        if isinstance(self.module, RoutedExperts):
            write_experts(self.module, self.parameter, rows)
            return
        held: nn.Parameter = getattr(self.module, self.parameter)
        if held.numel():
            held.data[: len(rows)].copy_(rows)
        else:
            own_dtype = rows.to(held.dtype, copy=True, memory_format=torch.contiguous_format)
            setattr(self.module, self.parameter, nn.Parameter(own_dtype, requires_grad=False))
        if self.shape is not None:
            self.module.quant_method.process_weights_after_loading(self.module)  # type: ignore[operator,union-attr]

    def _recovered(self, num_inputs: int) -> Tensor:
        """[outputs, inputs]: the layer's answer to the identity matrix."""
        weight: Tensor = getattr(self.module, self.parameter)
        return self.module.cpu_linear(_identity(num_inputs, weight.dtype), weight, None).t()  # type: ignore[operator]


@cache
def slots(
    model: nn.Module, *, rename: tuple[tuple[str, str], ...] = (), without: nn.Module | None = None
) -> tuple[Slot, ...]:
    """Every parameter of the model, in the parts that this rank holds; they stay, whatever is loaded into them.

    Args:
        rename: prefixes of the model's names, and what the checkpoint has instead of each; the first that fits counts.
        without: a model whose modules do not count: a draft borrows the policy's embeddings.
    Raises:
        LookupError: a module has parameters that this function does not know.
    """
    borrowed = set() if without is None else {id(module) for module in without.modules()}
    found: list[Slot] = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own and id(module) not in borrowed:
            found += _module_slots(_renamed(path, rename), module, own)
    return tuple(found)


def _renamed(path: str, rename: tuple[tuple[str, str], ...]) -> str:
    for old, new in rename:
        if path.startswith(old):
            return new + path.removeprefix(old)
    return path


def can_write(slots: Sequence[Slot], tensors: Mapping[str, Tensor]) -> bool:
    """Whether `Slot.write` does all that vLLM's own reload would: plain layers on a CPU, and tensors that fit them.

    A GPU's kernels may have derived more from a weight than its layer tells; there vLLM's reload it is.
    """
    names = {part.name for slot in slots for part in slot.parts}
    return (
        current_platform.is_cpu()
        and names == tensors.keys()
        and all(_is_plain(slot.module) for slot in slots)
        and all(part.start + part.length <= tensors[part.name].shape[part.dim] for slot in slots for part in slot.parts)
    )


def _is_plain(module: nn.Module) -> bool:
    if type(module) is RMSNorm or are_on_cpu(module):
        return True
    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    skips = getattr(module, "_cpu_skip_gemm_dispatch", False)  # whose weight others have taken apart
    return type(getattr(module, "quant_method", None)) in methods and not skips


def _module_slots(path: str, module: nn.Module, own: dict[str, nn.Parameter]) -> list[Slot]:
    if isinstance(module, RoutedExperts):
        parts_of = expert_parts(path, module, own)
        return [Slot(module=module, parameter=name, parts=parts) for name, parts in parts_of.items()]
    if isinstance(module, LinearBase):
        if "weight" not in own or own.keys() - {"weight", "bias"}:
            raise LookupError(f"{path} holds {sorted(own)}, not one weight and perhaps its bias")
        shape = _linear_shape(module)
        parts = _linear_parts(path, module, shape, _dtype(own["weight"]))
        weight = Slot(module=module, parameter="weight", parts=parts, shape=shape)
        if "bias" not in own:
            return [weight]
        return [weight, Slot(module=module, parameter="bias", parts=_of_bias(parts, own["bias"]))]
    if isinstance(module, VocabParallelEmbedding):
        held = module.shard_indices
        start, stop = held.org_vocab_start_index, held.org_vocab_end_index
        shape = (module.num_embeddings_per_partition, module.embedding_dim)
        part = WeightPart(name=f"{path}.weight", dim=0, start=start, length=stop - start, dtype=_dtype(own["weight"]))
        return [Slot(module=module, parameter="weight", parts=(part,), shape=shape)]
    return [
        Slot(
            module=module,
            parameter=name,
            parts=(WeightPart(name=_whole_name(path, name), dim=0, start=0, length=len(tensor), dtype=_dtype(tensor)),),
        )
        for name, tensor in own.items()
    ]


def _of_bias(parts: tuple[WeightPart, ...], bias: Tensor) -> tuple[WeightPart, ...]:
    """A number an output, in the same parts as the weight's rows.

    Raises:
        LookupError: the rows are cut by input, so that each rank holds all of them.
    """
    if any(part.dim for part in parts):
        raise LookupError(f"{parts[0].name} is split by its inputs, and has a bias")
    return tuple(replace(part, name=part.name.removesuffix("weight") + "bias", dtype=_dtype(bias)) for part in parts)


def _whole_name(path: str, name: str) -> str:
    """The checkpoint's name of a parameter that is there whole."""
    return f"{path}.{name}" if path else _RENAMED.get(name, name)


def _linear_shape(module: LinearBase) -> tuple[int, int]:
    """[outputs, inputs] of this rank."""
    if isinstance(module, RowParallelLinear):
        return module.output_size, module.input_size_per_partition
    if isinstance(module, ColumnParallelLinear):
        return module.output_size_per_partition, module.input_size
    return module.output_size, module.input_size


def _linear_parts(path: str, module: LinearBase, shape: tuple[int, int], dtype: str) -> tuple[WeightPart, ...]:
    rank, parent = module.tp_rank, path.rpartition(".")[0]
    if isinstance(module, QKVParallelLinear):
        kv_rank = rank // module.num_kv_head_replicas
        sizes = [module.num_heads * module.head_size] + [module.num_kv_heads * module.head_size] * 2
        starts = [rank * sizes[0], kv_rank * sizes[1], kv_rank * sizes[2]]
        return _stacked(path, [f"{parent}.{name}.weight" for name in _QKV], sizes, starts, shape, dtype)
    if isinstance(module, MergedColumnParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        starts = [rank * size for size in sizes]
        return _stacked(path, [f"{parent}.{name}.weight" for name in _GATE_UP], sizes, starts, shape, dtype)
    if isinstance(module, RowParallelLinear):
        width = shape[1]
        return (WeightPart(name=f"{path}.weight", dim=1, start=rank * width, length=width, dtype=dtype),)
    start = rank * shape[0] if isinstance(module, ColumnParallelLinear) else 0
    return (WeightPart(name=f"{path}.weight", dim=0, start=start, length=shape[0], dtype=dtype),)


def _stacked(
    path: str, names: list[str], sizes: list[int], starts: list[int], shape: tuple[int, int], dtype: str
) -> tuple[WeightPart, ...]:
    if len(names) != len(sizes) or sum(sizes) != shape[0]:
        raise LookupError(f"{path}: {names} do not make up {shape}: rows {sizes}")
    return tuple(
        WeightPart(name=name, dim=0, start=start, length=size, dtype=dtype)
        for name, size, start in zip(names, sizes, starts, strict=True)
    )


@cache
def _identity(size: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(size, dtype=dtype)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
