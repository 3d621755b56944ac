"""Division of a host's cores between engines and a learner that compute at the same time.

Threads that wait for one another spin, so two processes with a thread on every core stall each other. On two cores two
such processes took three to six times as long as one after the other. Each worker therefore keeps to its share of the
cores. Workers that lent idle cores to each other changed their number of threads all the time, and took longer
(research/log.md).
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from slipstream.workers.calls import Proxy

logger = logging.getLogger(__name__)


@contextmanager
def shared_cores(node_id: str, *parties: Proxy) -> Iterator[None]:
    """Give each worker on this process's node its share of the cores in the block; others keep their threads."""
    num_workers = sum(worker.node_id == node_id for party in parties for worker in party.workers)
    cores = num_cores()
    num_threads = max(1, cores // max(1, num_workers))
    logger.info("%d workers share the %d cores of this host: %d threads each", num_workers, cores, num_threads)
    for party in parties:
        party.limit_threads(node_id, num_threads)
    try:
        yield
    except BaseException:
        for party in parties:  # whose workers may be dead or busy
            party.forget_limit()
        raise
    for party in parties:
        party.limit_threads(node_id, None)


def num_cores() -> int:
    """Count the cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def set_threads(count: int) -> None:
    """Set the number of threads that the calling thread gets from every OpenMP runtime of this process.

    vLLM's kernels bring OpenMP runtimes of their own, which `torch.set_num_threads` does not reach.
    """
    import torch

    torch.set_num_threads(count)
    for runtime in _runtimes():
        runtime.omp_set_num_threads(count)


@lru_cache(maxsize=1)
def _runtimes() -> tuple[ctypes.CDLL, ...]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = sorted({line[5] for line in lines if len(line) == 6})  # anonymous memory has no sixth column
    return tuple(ctypes.CDLL(path) for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
