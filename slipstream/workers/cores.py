"""Division of a host's cores between engines and a learner that compute at the same time.

Threads that wait for one another spin, so two processes with a thread on every core stall each other. On two cores two
such processes took three to six times as long as one after the other. Each worker therefore marks in shared memory when
it is busy, and sets its number of threads by the number of busy workers. The number of threads must change no bit of a
rollout or an update. A worker whose results depend on threads (`slipstream.learner.numerics` tests for it) keeps the
number of threads that it has when all are busy.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from slipstream.workers.calls import Proxy

logger = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")  # a file system in memory


@dataclass(frozen=True, slots=True)
class CoreSlot:
    """A worker's byte in the shared memory of busy flags."""

    path: Path
    index: int


_WORKS, _RESTS = b"\x01", b"\x00"
_NUM_COLUMNS = 6  # of a line of /proc/self/maps that names a file


def write_shared(path: Path, num_workers: int) -> None:
    """Create the shared memory with a busy flag for each of `num_workers` workers."""
    path.write_bytes(_RESTS * num_workers)


class CoreShare:
    """One worker's busy flag, and the number of threads that follows from the flags of all workers."""

    def __init__(self, slot: CoreSlot, *, most: int, cores: int = 0, changes: bool = True) -> None:
        """Map the flags of `slot.path`.

        Args:
            most: largest number of threads of this worker.
            cores: number of shared cores; 0 takes the cores that this process may run on.
            changes: False counts all other workers as busy at all times, for results that depend on threads.
        """
        self._most = most
        self._slot = slot.index
        self._num_cores = cores or num_cores()
        with slot.path.open("r+b") as file:
            self._said = mmap.mmap(file.fileno(), 0)
        self._changes = changes
        self._num_threads = 0  # the number set last; 0 before the first

    @property
    def num_threads(self) -> int:
        """Threads of this worker now: the cores divided by the number of busy workers, with this worker counted."""
        num_workers = len(self._said)
        others = sum(self._said[i] for i in range(num_workers) if i != self._slot) if self._changes else num_workers - 1
        return min(self._most, max(1, self._num_cores // (1 + others)))

    def fit(self) -> None:
        """Set this process's number of threads to `num_threads`; call it between two computations."""
        num_threads = self.num_threads
        if num_threads != self._num_threads:
            set_threads(num_threads)
            self._num_threads = num_threads

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Mark this worker as busy in the block, so that other workers leave it a part of the cores."""
        self._said[self._slot : self._slot + 1] = _WORKS
        try:
            self.fit()
            yield
        finally:
            self._said[self._slot : self._slot + 1] = _RESTS

    def leave(self) -> None:
        """Unmap the flags and take this worker's largest number of threads."""
        self._said.close()
        set_threads(self._most)


@contextmanager
def shared_cores(node_id: str, *parties: Proxy) -> Iterator[None]:
    """Let the workers on this process's node share its cores in the block; workers on other nodes keep theirs."""
    with tempfile.TemporaryDirectory(
        dir=_MEMORY if _MEMORY.is_dir() else None, prefix="slipstream-cores-"
    ) as directory:
        path = Path(directory) / "at_work"
        indices = itertools.count()
        slots = [
            [CoreSlot(path, next(indices)) if worker.node_id == node_id else None for worker in party.workers]
            for party in parties
        ]
        num_workers = next(indices)
        write_shared(path, num_workers)
        logger.info("%d workers share the %d cores of this host", num_workers, num_cores())
        for party, own in zip(parties, slots, strict=True):
            party.share_cores(own)
        try:
            yield
        except BaseException:
            for party in parties:  # whose workers may be dead or busy
                party.forget_slots()
            raise
        for party, own in zip(parties, slots, strict=True):
            party.share_cores([None] * len(own))


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
    mapped = {line[5] for line in lines if len(line) == _NUM_COLUMNS}  # anonymous memory has no sixth column
    paths = sorted(path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
    return tuple(ctypes.CDLL(path) for path in paths)
