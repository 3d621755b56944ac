"""Continuous batching over responses of unequal length: the running batch shrinks and the tail is exposed.

Sequences that run together advance together (each iteration gives each the same expected number of tokens), so the
schedule is a matter of tokens alone: it holds for any model, hardware and k, and is worked out once.

Legend: `B` sequences of one engine, `S` spans between two changes of the running batch.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.config import require
from slipstream.sim.lengths import Lengths, mean_square_tokens, mean_tokens, stratified

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One engine's rollout: in each span `batch_S` sequences run until each has `tokens_S` tokens more."""

    tokens_S: Array
    batch_S: Array
    context_S: Array  # tokens in the key-value cache, all running sequences together, mean over the span

    @property
    def generated_tokens(self) -> float:
        """Tokens of all responses."""
        return float(self.tokens_S @ self.batch_S)

    @property
    def largest_batch(self) -> float:
        """Most sequences that run at once."""
        return float(self.batch_S.max())


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutShape:
    """How many responses a step has and over how many engines they are spread."""

    num_rollouts: int
    num_engines: int
    prompt_tokens: float
    max_running: int = 1_000_000  # an engine's slots (vLLM's max_num_seqs)

    def __post_init__(self) -> None:
        require(self.num_engines >= 1, "num_engines", "must be >= 1", self.num_engines)
        require(
            self.num_rollouts >= self.num_engines,
            "num_rollouts",
            f"must give each of the {self.num_engines} engines a response",
            self.num_rollouts,
            "use fewer GPUs, or more of them an engine",
        )
        require(self.max_running >= 1, "max_running", "must be >= 1", self.max_running)

    @property
    def per_engine(self) -> int:
        """Responses of the fullest engine."""
        return -(-self.num_rollouts // self.num_engines)


def slowest_engine(lengths: Lengths, shape: RolloutShape) -> Trace:
    """The rollout of the engine that ends last: typical responses, and the longest of all engines'."""
    lengths_B = stratified(lengths, shape.per_engine, longest_of_count=shape.num_rollouts)
    return batch_continuously(lengths_B, prompt_tokens=shape.prompt_tokens, max_running=shape.max_running)


def batch_continuously(lengths_B: Array, *, prompt_tokens: float, max_running: int) -> Trace:
    """Run sequences of `lengths_B` tokens in `max_running` slots; one that waits starts when another ends."""
    starts_B = np.zeros_like(lengths_B) if len(lengths_B) <= max_running else _queued_starts(lengths_B, max_running)
    ends_B = starts_B + lengths_B
    borders = np.unique(np.concatenate([starts_B, ends_B]))
    tokens_S = np.diff(borders)
    starts, ends = np.sort(starts_B), np.sort(ends_B)
    started_S = np.searchsorted(starts, borders[:-1], side="right")
    ended_S = np.searchsorted(ends, borders[:-1], side="right")
    batch_S = (started_S - ended_S).astype(np.float64)
    # Sum over running sequences of (position - start): from running totals of the starts of all that run.
    by_start, by_end = np.argsort(starts_B, kind="stable"), np.argsort(ends_B, kind="stable")
    begun = np.concatenate([[0.0], np.cumsum(starts_B[by_start])])[started_S]
    done = np.concatenate([[0.0], np.cumsum(starts_B[by_end])])[ended_S]
    middle_S = 0.5 * (borders[1:] + borders[:-1])
    context_S = batch_S * (prompt_tokens + middle_S) - (begun - done)
    return Trace(tokens_S=tokens_S, batch_S=batch_S, context_S=context_S)


def steady_state(lengths: Lengths, *, running_S: Array, prompt_tokens: float) -> Trace:
    """Engines that are never drained: `running_S` sequences at all times, each span one mean response long.

    The spans are alternatives, one an entry of `running_S`. A sequence is met in proportion to its length and half-way
    through on average, so the mean context is prompt + E[L^2] / (2 E[L]).
    """
    mean = mean_tokens(lengths)
    context = prompt_tokens + mean_square_tokens(lengths) / (2.0 * mean)
    return Trace(
        tokens_S=np.full_like(running_S, mean),
        batch_S=running_S,
        context_S=running_S * context,
    )


def _queued_starts(lengths_B: Array, max_running: int) -> Array:
    # In the order of arrival, which knows nothing of the lengths: a fixed shuffle.
    order = np.random.default_rng(0).permutation(len(lengths_B))
    starts = np.zeros(len(lengths_B))
    free: list[float] = [0.0] * max_running
    for index in order:
        begin = heapq.heappop(free)
        heapq.heappush(free, begin + float(lengths_B[index]))
        starts[index] = begin
    return starts
