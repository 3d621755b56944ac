"""Reading the weights that a vLLM model really computes with, whatever layout it keeps them in.

Fused layers are cut into the checkpoint's tensors, tensor-parallel shards are named by the slice they hold, and
weights that a CPU backend has packed out of sight are recovered by multiplying with the identity, which is exact:
every sum has one term.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from slipstream.fingerprint import WeightPart

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


def weights(
    model: nn.Module, *, rename: tuple[str, str], without: nn.Module | None
) -> Iterator[tuple[WeightPart, Tensor]]:
    """Every weight of the model, in the parts that this rank holds.

    Args:
        rename: prefix of the model's names, and the one that the checkpoint has instead.
        without: a model whose modules do not count: a draft borrows the policy's embeddings.
    Raises:
        LookupError: a module has parameters that this function does not know how to read.
    """
    borrowed = set() if without is None else {id(module) for module in without.modules()}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or id(module) in borrowed:
            continue
        for part, tensor in _module_weights(path, module, own):
            old, new = rename
            name = new + part.name.removeprefix(old) if part.name.startswith(old) else part.name
            yield WeightPart(name=name, dim=part.dim, start=part.start, length=part.length, dtype=part.dtype), tensor


def _module_weights(path: str, module: nn.Module, own: dict[str, nn.Parameter]) -> Iterator[tuple[WeightPart, Tensor]]:
    if isinstance(module, LinearBase):
        if set(own) != {"weight"}:
            raise LookupError(f"{path} holds {sorted(own)}, not one weight")
        yield from _linear(path, module)
    elif isinstance(module, VocabParallelEmbedding):
        held = module.shard_indices
        start, stop = held.org_vocab_start_index, held.org_vocab_end_index
        weight = own["weight"] if own["weight"].numel() else _recover(module, module.embedding_dim)
        yield _part(f"{path}.weight", 0, start, stop - start, weight[: stop - start])
    else:
        for name, tensor in own.items():
            if tensor.numel() == 0:
                raise LookupError(f"{path}.{name} is empty: its backend hides it")
            yield _part(f"{path}.{name}", 0, 0, tensor.shape[0], tensor)


def _linear(path: str, module: LinearBase) -> Iterator[tuple[WeightPart, Tensor]]:
    weight: Tensor = module.weight  # type: ignore[assignment]
    if weight.numel() == 0:
        weight = _recover(
            module, module.input_size // module.tp_size if isinstance(module, RowParallelLinear) else module.input_size
        )
    rank, parent = module.tp_rank, path.rpartition(".")[0]
    if isinstance(module, QKVParallelLinear):
        kv_rank = rank // module.num_kv_head_replicas
        sizes = [module.num_heads * module.head_size] + [module.num_kv_heads * module.head_size] * 2
        starts = [rank * sizes[0], kv_rank * sizes[1], kv_rank * sizes[2]]
        yield from _split(weight, [f"{parent}.{name}.weight" for name in _QKV], sizes, starts)
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        yield from _split(weight, [f"{parent}.{n}.weight" for n in _GATE_UP], sizes, [rank * size for size in sizes])
    elif isinstance(module, RowParallelLinear):
        width = weight.shape[1]
        yield _part(f"{path}.weight", 1, rank * width, width, weight)
    else:
        start = rank * weight.shape[0] if isinstance(module, ColumnParallelLinear) else 0
        yield _part(f"{path}.weight", 0, start, weight.shape[0], weight)


def _split(
    weight: Tensor, names: list[str], sizes: list[int], starts: list[int]
) -> Iterator[tuple[WeightPart, Tensor]]:
    if len(names) != len(sizes) or sum(sizes) != weight.shape[0]:
        raise LookupError(f"{names} do not make up {tuple(weight.shape)}: rows {sizes}")
    for name, size, start, rows in zip(names, sizes, starts, weight.split(sizes), strict=True):
        yield _part(name, 0, start, size, rows)


def _recover(module: nn.Module, num_inputs: int) -> Tensor:
    """[outputs, inputs] of a layer whose weight is packed: its answer to the identity matrix."""
    if not hasattr(module, "cpu_linear"):
        raise LookupError(f"{type(module).__name__} keeps its weight neither in sight nor behind cpu_linear")
    identity = torch.eye(num_inputs, dtype=module.weight.dtype)  # type: ignore[arg-type]
    return module.cpu_linear(identity, module.weight, None).t()  # type: ignore[operator]


def _part(name: str, dim: int, start: int, length: int, tensor: Tensor) -> tuple[WeightPart, Tensor]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return WeightPart(name=name, dim=dim, start=start, length=length, dtype=dtype), tensor
