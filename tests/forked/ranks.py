"""A function in a process for each rank of a process group, and the ports where ranks meet."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import replace
from typing import Any

from slipstream.learner.config import LearnerConfig, Packing, ParallelConfig, Recompute
from slipstream.types import Dtype
from tests.forked.processes import fork_server

_SPLITS: dict[str, dict[str, Any]] = {
    **{name: {name: 2} for name in ("tensor", "pipeline", "data", "context")},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "experts": {"data": 2, "expert": 2},
    "three stages": {"pipeline": 3},
}
_HOW: dict[str, dict[str, Any]] = {
    "in chunks": {"logprob_chunk_tokens": 10},
    "packed": {"packing": Packing.ALWAYS},
    "parts recomputed": {"recompute": Recompute.SELECTIVE},
    "layers recomputed": {"recompute": Recompute.FULL},
    "optimizer split": {"distributed_optimizer": True},
    "bfloat16": {"dtype": Dtype.BFLOAT16},
}


def learner_of(name: str, base: LearnerConfig) -> LearnerConfig:
    """The learner that a name like `context and data in chunks, packed` describes: its splits, and how it computes."""
    splits, *how = name.replace(" in chunks", ", in chunks").split(", ")
    sizes = {size: num for each in splits.split(" and ") for size, num in _SPLITS[each].items()}
    changes = {field: value for each in how for field, value in _HOW[each].items()}
    return replace(base, parallel=ParallelConfig(**sizes), **changes)


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
    """Run `function(rank, *args)` in a process for each rank; return the results in rank order.

    Raises:
        Exception: the first that a rank raised; a rank that waits for one that has failed is killed, not waited for.
        TimeoutError: nothing was raised in that time, and some rank has not returned.
    """
    with ProcessPoolExecutor(num_ranks, mp_context=fork_server()) as pool:
        ranks = [pool.submit(function, rank, *args) for rank in range(num_ranks)]
        done, waiting = wait(ranks, timeout=timeout_s, return_when=FIRST_EXCEPTION)
        if waiting:
            for process in pool._processes.values():
                process.kill()
        for rank in done:
            rank.result()  # the first error, not that of the rank which was killed for it
        if waiting:
            raise TimeoutError(f"{len(waiting)} of {num_ranks} ranks have not returned after {timeout_s:.0f} s")
        return [rank.result() for rank in ranks]


def on_ranks_of(learner: LearnerConfig, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(rank, learner, *args)` on each rank of a learner, whose process group stands around it."""
    (port,) = free_ports(1)
    return on_ranks(learner.parallel.world_size, _in_group, port, function, learner, *args)


def _in_group(rank: int, port: int, function: Callable[..., Any], learner: LearnerConfig, *args: Any) -> Any:
    from slipstream.learner import parallel

    join(rank, learner.parallel.world_size, port)
    result = function(rank, learner, *args)
    parallel.barrier()
    parallel.teardown()
    return result


def join(rank: int, world_size: int, port: int) -> None:
    """Form the process group of a learner on this host; rank 0 opens the port."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


def free_ports(count: int) -> list[int]:
    """Find free ports below those that the system gives whoever asks for any: some are opened a minute later."""
    ports: list[int] = []
    for port in random.sample(range(20_000, 32_768), 2000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError(f"{count} free ports are needed, found {ports}")
