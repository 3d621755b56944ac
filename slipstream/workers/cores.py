"""The cores of a host whose engines and learner work at the same time: each takes its part, and all when it is alone.

Threads that wait for one another spin, so two processes with a thread on every core stop each other: on two cores they
took three to six times as long as in turn. So each worker says in shared memory while it works, and fits its number of
threads to how many do so. That must change no rollout and no update to the last bit: one whose results depend on its
threads (`slipstream.learner.numerics` knows) keeps the number that it has while all work.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from slipstream.workers.calls import Worker

logger = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")  # what is written there stays in memory


@dataclass(frozen=True, slots=True)
class CoreSlot:
    """A worker's byte in the shared memory that says who works."""

    path: Path
    index: int


_WORKS, _RESTS = b"\x01", b"\x00"
_NUM_COLUMNS = 6  # of a line of /proc/self/maps that names a file


def write_shared(path: Path, num_workers: int) -> None:
    """Make the shared memory in which `num_workers` workers say whether they work."""
    path.write_bytes(_RESTS * num_workers)


class CoreShare:
    """One worker's view of who works."""

    def __init__(self, slot: CoreSlot, *, most: int, cores: int = 0, changes: bool = True) -> None:
        """Join the workers of `slot.path`.

        Args:
            most: threads that this worker ever takes.
            cores: that all share; 0: those that this process may run on.
            changes: False always counts all others as at work: for one whose results depend on its threads.
        """
        self._most = most
        self._slot = slot.index
        self._num_cores = cores or num_cores()
        with slot.path.open("r+b") as file:
            self._said = mmap.mmap(file.fileno(), 0)
        self._changes = changes
        self._num_threads = 0  # as set last; 0: never

    @property
    def num_threads(self) -> int:
        """Threads of this worker now: the cores over the number of workers at work, this one counted."""
        num_workers = len(self._said)
        others = sum(self._said[i] for i in range(num_workers) if i != self._slot) if self._changes else num_workers - 1
        return min(self._most, max(1, self._num_cores // (1 + others)))

    def fit(self) -> None:
        """Take as many threads from now on as are this worker's now; to be called between two pieces of work."""
        num_threads = self.num_threads
        if num_threads != self._num_threads:
            set_threads(num_threads)
            self._num_threads = num_threads

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Have the others leave this worker its part of the cores."""
        self._said[self._slot : self._slot + 1] = _WORKS
        try:
            self.fit()
            yield
        finally:
            self._said[self._slot : self._slot + 1] = _RESTS

    def leave(self) -> None:
        """Work alone from now on."""
        self._said.close()
        set_threads(self._most)


class Sharing(Protocol):
    """Engines, or the ranks of a learner."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Actors and the nodes that they run on."""
        ...

    def share_cores(self, slots: Sequence[CoreSlot | None]) -> None:
        """Hand each its slot; None for one that shares no cores, or no longer."""
        ...


@contextmanager
def shared_cores(node_id: str, *parties: Sharing) -> Iterator[None]:
    """Have the workers on this process's node share its cores in the block; others go on as they are."""
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
        yield
        for party, own in zip(parties, slots, strict=True):
            party.share_cores([None] * len(own))


def num_cores() -> int:
    """Number of cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def set_threads(count: int) -> None:
    """Have every OpenMP runtime of this process compute with `count` threads when the calling thread asks for it.

    vLLM's kernels bring runtimes of their own beside torch's, which torch's call does not reach.
    """
    import torch

    torch.set_num_threads(count)
    for runtime in _runtimes():
        runtime.omp_set_num_threads(count)


@lru_cache(maxsize=1)
def _runtimes() -> tuple[ctypes.CDLL, ...]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = {line[5] for line in lines if len(line) == _NUM_COLUMNS}  # the last is the file; memory has none
    paths = sorted(path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp")))
    return tuple(ctypes.CDLL(path) for path in paths)
