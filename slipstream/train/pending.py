"""Rollouts that an asynchronous training has generated or begun but not trained on: a part of its checkpoints.

They are written as JSON, which holds no code, and whose floats come back to the last bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.config import from_mapping, to_mapping
from slipstream.engine.protocol import GenerationResult
from slipstream.learner.checkpoint import CheckpointError
from slipstream.records.files import write_atomic
from slipstream.rewards.reward import RewardResult
from slipstream.train.batch import Versions


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Rollouts that left the engines together, with their rewards: a whole batch, or one group."""

    index: int  # of the batch, or of the group, over the whole training
    result: GenerationResult
    rewards: RewardResult
    generated_s: float = 0.0  # end of their generation, on this process's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """Rollouts between two steps that are not trained on yet.

    Attributes:
        scored: scored rollouts, in the order of the queue.
        under_way: indices of submitted groups that are not scored; a resumed attempt restarts them.
        published: versions of policy and draft that `scored` may come from.
    """

    scored: tuple[Scored, ...] = ()
    under_way: tuple[int, ...] = ()
    published: tuple[Versions, ...] = ()

    def to_bytes(self) -> bytes:
        """Serialize to what `from_bytes` reads, but for times on this process's clock."""
        timeless = replace(self, scored=tuple(replace(each, generated_s=0.0) for each in self.scored))
        return json.dumps(to_mapping(timeless), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Pending:
        """Deserialize.

        Raises:
            CheckpointError: the bytes are damaged.
        """
        try:
            return from_mapping(cls, json.loads(data))
        except ValueError as error:
            raise CheckpointError(
                f"rollouts that wait for training must be as they were written, got {error!r}"
            ) from error


class Submitted:
    """File with the number of groups ever submitted to engines, by which a resumed attempt counts the lost ones."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, num_submitted: int) -> None:
        """Raise the number in the file to `num_submitted`."""
        if num_submitted > self.read():
            write_atomic(self._path, str(num_submitted).encode())

    def read(self) -> int:
        """Number over all attempts so far; 0 before the first."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return 0
