"""How the learner's ranks agree on a checkpoint without disturbing the collectives of training."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=30)  # the slowest rank's disk may take this much longer than the fastest's


class Ranks(Protocol):
    """The processes that write or read one checkpoint together."""

    @property
    def rank(self) -> int:
        """This process; 0 is the main one."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """What JSON can hold, of every rank in rank order; waits for all of them."""
        ...


def on_all(ranks: Ranks, work: Callable[[], Any], *, error: type[Exception]) -> list[Any]:
    """Do a part of the work on each rank, and wait until all have; what they returned, in rank order.

    Raises:
        error: a rank failed; all raise it, with that rank's words.
    """
    problem, value, cause = None, None, None
    try:
        value = work()
    except Exception as caught:  # noqa: BLE001  # whatever it is, the other ranks wait to hear of it; raised below
        cause = caught
        problem = str(caught) if isinstance(caught, error) else f"{type(caught).__name__}: {caught}"
    where = f"rank {ranks.rank} on host {this_host()}: " if ranks.size > 1 else ""
    reports = ranks.gather([None if problem is None else where + problem, value])
    problems = [problem for problem, _ in reports if problem is not None]
    if problems:
        raise error("; ".join(problems)) from cause
    return [value for _, value in reports]


def this_host() -> str:
    """How an error names the machine that a rank runs on."""
    return socket.gethostname()


class LearnerRanks:
    """The learner's process group, over gloo connections of its own: a background thread may use them.

    Make it on every rank at the same point of the program, for a process group is made collectively.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """What JSON can hold, of every rank in rank order; waits for all of them."""
        data = json.dumps(value).encode()
        if self._group is None:
            return [json.loads(data)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self._group)
        return [json.loads(text.numpy().tobytes()) for text in texts]
