"""Bringing what ranks hold in parts to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slipstream.learner import parallel


def tensor_parallel_shards(tensor: Tensor) -> list[Tensor]:
    """The tensors of all tensor-parallel ranks, in rank order."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(shards, tensor.contiguous(), group=tensor_group())
    return shards


def from_expert_rank(holder: int, tensor: Tensor) -> Tensor:
    """The tensor of one of the ranks that experts are dealt to, on all of them; all pass one of its shape."""
    group = _expert_group()
    if group.size() == 1:
        return tensor
    shared = tensor.contiguous() if group.rank() == holder else torch.empty_like(tensor)
    dist.broadcast(shared, src=dist.get_process_group_ranks(group)[holder], group=group)
    return shared


def most_over_expert_ranks(count: int) -> int:
    """The largest of the counts of the ranks that experts are dealt to."""
    group = _expert_group()
    if group.size() == 1:
        return count
    most = torch.tensor(count, device=parallel.device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most.item())


def from_pipeline_stage(stage: int, tensors: Sequence[tuple[str, Tensor]] | None) -> list[tuple[str, Tensor]]:
    """Named tensors of one pipeline stage, on every stage; only that stage passes them."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        assert tensors is not None
        return list(tensors)
    group = _pipeline_group()
    source = dist.get_process_group_ranks(group)[stage]
    headers = [None if tensors is None else [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]]
    dist.broadcast_object_list(headers, src=source, group=group)
    assert headers[0] is not None
    received = []
    for index, (name, shape, dtype) in enumerate(headers[0]):
        tensor = (
            torch.empty(shape, dtype=dtype, device=parallel.device())
            if tensors is None
            else tensors[index][1].contiguous()
        )
        dist.broadcast(tensor, src=source, group=group)
        received.append((name, tensor))
    return received


def from_last_stage(tensor: Tensor) -> Tensor:
    """What only the last pipeline stage has filled in, on every stage: the others pass zeros."""
    return _summed(tensor, _pipeline_group())


def num_pipeline_stages() -> int:
    """Over how many ranks the layers are dealt."""
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def from_pipeline_stages(tensor: Tensor) -> Tensor:
    """What each stage has filled in of a tensor, on every stage: where it has nothing it passes zeros."""
    return _summed(tensor, _pipeline_group())


def sum_over_data_ranks(count: int) -> int:
    """Sum of the data-parallel ranks' counts."""
    if _data_group().size() == 1:
        return count
    return int(summed_over_data_ranks(torch.tensor(count, device=parallel.device())).item())


def summed_over_data_ranks(tensor: Tensor) -> Tensor:
    """Sum over the data-parallel ranks, on the device where the learner's ranks exchange tensors."""
    if _data_group().size() == 1:
        return tensor
    return _summed(tensor.to(parallel.device(), copy=True), _data_group()).to(tensor.device)


def sum_results(results: Sequence[dict[str, Tensor]], names: Sequence[str], device: torch.device) -> dict[str, float]:
    """Sum named scalars over micro-batches and ranks; `results` is empty except on the last pipeline stage."""
    sums = torch.zeros(len(names), dtype=torch.float64, device=device)
    for result in results:
        sums += torch.stack([result[name].double() for name in names])
    return dict(zip(names, from_last_stage(_summed(sums, _data_group())).tolist(), strict=True))


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


# Megatron declares its groups as a group, a list of groups or None, and gives a group for every layout of ours.


def tensor_group() -> dist.ProcessGroup:
    """The ranks that hold the parts of one layer."""
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def _pipeline_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def _expert_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group())


def _data_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())
