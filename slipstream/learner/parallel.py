"""Process group and Megatron's model-parallel state of a learner rank, and collectives between the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from slipstream.config import require
from slipstream.learner.config import ParallelConfig
from slipstream.learner.cpu import host
from slipstream.learner.weights import Shard


def initialize(parallel: ParallelConfig) -> None:
    """Initialize Megatron's parallel state for a layout, once a process; a second policy shares the state.

    The ranks of a learner form their process group before (`rendezvous`); a process without a group is the only rank.
    """
    host.install()
    if not dist.is_initialized():  # without a port, so that any number of single-rank learners run on one machine
        dist.init_process_group("gloo" if host.is_cpu_only() else "nccl", store=HashStore(), rank=0, world_size=1)
    need, size = parallel.world_size, dist.get_world_size()
    require(size == need, "learner.parallel", f"must multiply to the {size} ranks started", need)
    if parallel_state.model_parallel_is_initialized():
        joined = layout()
        wanted = {name: value for name, value in vars(parallel).items() if name in joined}
        fix = f"this process has joined as {joined}; call parallel.teardown() first"
        require(joined == wanted, "learner.parallel", "must not change within a process", wanted, fix)
        return
    if not host.is_cpu_only():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count())))
    with host.cuda_as_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
        )
        model_parallel_cuda_manual_seed(0)


def layout() -> dict[str, int]:
    """Return the sizes of this process's layout, under their names in `learner.parallel`."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def teardown() -> None:
    """Leave the process group, so that `initialize` may be called with another layout."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def current_shard() -> Shard:
    """Return which part of the model this rank holds."""
    return Shard(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        data_rank=copies_group().rank(),
    )


def device() -> torch.device:
    """Return the device on which this rank computes."""
    return torch.device("cpu") if host.is_cpu_only() else torch.device("cuda", torch.cuda.current_device())


def is_main_rank() -> bool:
    """Return True on rank 0, which writes the files that all ranks share."""
    return dist.get_rank() == 0


def barrier() -> None:
    """Wait until every learner rank has arrived."""
    if dist.get_world_size() > 1:
        dist.barrier()


def tensor_parallel_shards(tensor: Tensor) -> list[Tensor]:
    """Gather the tensors of all tensor-parallel ranks, in rank order."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(shards, tensor.contiguous(), group=tensor_group())
    return shards


def context_part(tensor: Tensor, dim: int) -> Tensor:
    """Cut out this context-parallel rank's tokens, which lie along `dim`."""
    group = context_group()
    return tensor.chunk(group.size(), dim)[group.rank()]


def all_tokens(tensor: Tensor, dim: int) -> Tensor:
    """Gather the tokens of all context-parallel ranks along `dim`; the backward pass cuts the gradient back.

    All these ranks compute the same from the result, so their gradients are equal and are not summed.
    """
    if context_group().size() == 1:
        return tensor
    first = tensor.transpose(0, dim).contiguous()
    whole = gather_from_sequence_parallel_region(first, tensor_parallel_output_grad=False, group=context_group())
    return cast(Tensor, whole).transpose(0, dim)


def own_heads(tensor: Tensor) -> Tensor:
    """Exchange all heads [S / c, B, N, D] of this context-parallel rank's tokens for [S, B, N / c, D].

    The result has all tokens in order, and of the heads the part of this rank among the c ranks. The backward pass
    exchanges the gradient back.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    group = context_group()
    if group.size() == 1:
        return tensor
    by_rank = torch.stack(tensor.chunk(group.size(), 2))  # [c, S / c, B, N / c, D]
    return cast(Tensor, all_to_all(group, by_rank)).flatten(0, 1)


def own_tokens(tensor: Tensor) -> Tensor:
    """Undo `own_heads` for attention's output: exchange [S, B, N D / c] for [S / c, B, N D]."""
    group = context_group()
    if group.size() == 1:
        return tensor
    by_rank = cast(Tensor, all_to_all(group, tensor.unflatten(0, (group.size(), -1))))  # [c, S / c, B, N D / c]
    return by_rank.movedim(0, 2).flatten(2)


def gather_in_place(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Complete a flat tensor of which each rank of a group holds one of equal parts, in rank order."""
    if group.size() > 1:
        dist.all_gather_into_tensor(tensor, tensor.chunk(group.size())[group.rank()], group=group)


def from_expert_rank(holder: int, tensor: Tensor) -> Tensor:
    """Broadcast the tensor of one expert-parallel rank to the others; every rank passes a tensor of that shape."""
    group = _expert_group()
    if group.size() == 1:
        return tensor
    shared = tensor.contiguous() if group.rank() == holder else torch.empty_like(tensor)
    dist.broadcast(shared, group=group, group_src=holder)
    return shared


def most_over_expert_ranks(count: int) -> int:
    """Return the largest count over the expert-parallel ranks."""
    return int(all_reduce(torch.tensor(count, device=device()), _expert_group(), dist.ReduceOp.MAX).item())


def from_pipeline_stage(stage: int, tensors: Sequence[tuple[str, Tensor]] | None) -> list[tuple[str, Tensor]]:
    """Broadcast named tensors of one pipeline stage to all stages; the other stages pass None."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        assert tensors is not None
        return list(tensors)
    group = _pipeline_group()
    headers = [None if tensors is None else [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]]
    dist.broadcast_object_list(headers, group=group, group_src=stage)
    assert headers[0] is not None
    received = []
    for index, (name, shape, dtype) in enumerate(headers[0]):
        tensor = torch.empty(shape, dtype=dtype, device=device()) if tensors is None else tensors[index][1].contiguous()
        dist.broadcast(tensor, group=group, group_src=stage)
        received.append((name, tensor))
    return received


def sum_over_stages(tensor: Tensor) -> Tensor:
    """Sum a tensor over the pipeline stages; a stage passes zeros where another stage has the values."""
    return all_reduce(tensor, _pipeline_group())


def sum_over_data_ranks(count: int) -> int:
    """Sum a count over the data-parallel ranks."""
    return int(all_reduce(torch.tensor(count, device=device()), _data_group()).item())


def summed_over_data_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over the data-parallel ranks; the sum is exchanged on the learner's device."""
    return all_reduce(tensor.to(device(), copy=True), _data_group()).to(tensor.device)


def summed_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks of the learner; the sum is exchanged on the learner's device."""
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    return all_reduce(tensor.to(device(), copy=True), world).to(tensor.device)


def model_rank() -> int:
    """Return the number of this rank among those that work on the same share of a batch."""
    shard, context = current_shard(), context_group()
    return (shard.pipeline_rank * context.size() + context.rank()) * shard.tensor_size + shard.tensor_rank


def sum_results(results: Sequence[dict[str, Tensor]], names: Sequence[str]) -> dict[str, float]:
    """Sum named scalars over micro-batches and ranks; `results` is empty except on the last pipeline stage."""
    sums = torch.zeros(len(names), dtype=torch.float64, device=device())
    for result in results:
        sums += torch.stack([result[name].double() for name in names])
    return dict(zip(names, sum_over_stages(all_reduce(sums, _data_group())).tolist(), strict=True))


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Combine a tensor over the ranks of a group, in place."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


# Megatron declares a group, a list of groups or None, and returns a single group for every layout of ours.


def tensor_group() -> dist.ProcessGroup:
    """Return the tensor-parallel ranks, which hold the parts of one layer."""
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def context_group() -> dist.ProcessGroup:
    """Return the context-parallel ranks, which hold parts of the same sequences and the same parameters."""
    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())


def copies_group() -> dist.ProcessGroup:
    """Return the data- and context-parallel ranks, which hold the same parameters, apart from experts."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))


def _pipeline_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def _expert_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group())


def _data_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())
