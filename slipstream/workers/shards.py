"""A batch dealt to the learner's data-parallel ranks, and their answers put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.config import require
from slipstream.learner.packing import plan_shards

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shards:
    """Which sequences of a batch each data-parallel rank computes, balanced by tokens."""

    indices: tuple[tuple[int, ...], ...]  # by data-parallel rank

    @classmethod
    def of(cls, sequences: Sequence[Any], num_ranks: int) -> Shards:
        """Deal the sequences; a rank may have none."""
        return cls(tuple(plan_shards([len(sequence) for sequence in sequences], num_ranks)))

    @classmethod
    def of_update(cls, sequences: Sequence[Any], num_ranks: int) -> Shards:
        """Deal the sequences of an optimizer update, of which every rank needs one.

        Raises:
            ConfigError: there are fewer sequences than ranks.
        """
        require(
            len(sequences) >= num_ranks,
            "an update",
            f"must have a sequence for each of {num_ranks} data-parallel ranks",
            len(sequences),
            "lower learner.parallel.data, or take more rollouts a step",
        )
        return cls.of(sequences, num_ranks)

    def in_order(self, answers: Sequence[Sequence[T]]) -> list[T]:
        """One answer a sequence in the batch's order, from the answers of each rank in its own."""
        by_index = {
            index: answer
            for indices, rows in zip(self.indices, answers, strict=True)
            for index, answer in zip(indices, rows, strict=True)
        }
        return [by_index[index] for index in range(len(by_index))]
