"""Process group and Megatron model-parallel state of a learner rank."""

from __future__ import annotations

import os
from typing import TypedDict

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore, TCPStore

from slipstream.config import require
from slipstream.learner.config import ParallelConfig
from slipstream.learner.cpu import host
from slipstream.learner.weights import Shard


class Rank(TypedDict, total=False):
    """Which rank of the learner a process is, and where rank 0 waits; see `initialize`."""

    rank: int
    world_size: int
    master_address: str
    master_port: int


def initialize(
    parallel: ParallelConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    master_address: str = "127.0.0.1",
    master_port: int = 0,
    seed: int = 0,
) -> None:
    """Join the learner's process group, once a process; a second policy in the process shares it.

    Args:
        master_port: port of rank 0, needed with more than one rank; a single rank opens none.
    Raises:
        ConfigError: `world_size` is not the product of `parallel`, or the process has joined with another layout.
    """
    need = parallel.world_size
    require(world_size == need, "learner.parallel", f"must multiply to the {world_size} ranks started", need)
    host.install()
    if parallel_state.model_parallel_is_initialized():
        _require_same_layout(parallel)
        return
    if not host.is_cpu_only():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
    if not dist.is_initialized():  # ranks on several hosts have met before: `rendezvous`
        _init_process_group(rank, world_size, master_address, master_port)
    with host.cuda_as_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            expert_model_parallel_size=parallel.expert,
        )
        model_parallel_cuda_manual_seed(seed)


def _init_process_group(rank: int, world_size: int, master_address: str, master_port: int) -> None:
    backend = "gloo" if host.is_cpu_only() else "nccl"
    if world_size == 1:
        # Nobody to meet: no port, so that any number of single-rank learners run on one machine.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    store = TCPStore(master_address, master_port, world_size, is_master=rank == 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _require_same_layout(parallel: ParallelConfig) -> None:
    shard = current_shard()
    joined = (shard.tensor_size, shard.pipeline_size, shard.expert_size)
    wanted = (parallel.tensor, parallel.pipeline, parallel.expert)
    fix = f"this process has joined as {joined}; call parallel.teardown() first"
    require(
        joined == wanted, "learner.parallel", "must not change within a process (tensor, pipeline, expert)", wanted, fix
    )


def teardown() -> None:
    """Leave the process group, so that `initialize` may be called with another layout."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def current_shard() -> Shard:
    """Which part of the model this rank holds."""
    return Shard(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
    )


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cpu") if host.is_cpu_only() else torch.device("cuda", torch.cuda.current_device())


def is_main_rank() -> bool:
    """Whether this rank writes the files that exist once."""
    return dist.get_rank() == 0


def barrier() -> None:
    """Wait for every learner rank."""
    if dist.get_world_size() > 1:
        dist.barrier()
