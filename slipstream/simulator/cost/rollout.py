"""Continuous batching over responses of unequal length: the running batch shrinks and the tail is exposed.

Sequences that run together advance together (each iteration gives each the same expected number of tokens), so the
schedule is a matter of tokens alone: it holds for any model, hardware and k, and is worked out once.

Legend: `B` sequences of one engine, `S` spans between two changes of the running batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from slipstream.simulator.cost.arrays import Array
from slipstream.simulator.cost.lengths import Lengths, stratified


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One engine's rollout: in each span `batch_S` sequences run until each has `tokens_S` tokens more."""

    tokens_S: Array
    batch_S: Array
    context_S: Array  # tokens in the key-value cache, all running sequences together, mean over the span


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutShape:
    """How many responses a step has and over how many engines they are spread, at least one an engine."""

    num_rollouts: int
    num_engines: int
    prompt_tokens: float

    @property
    def per_engine(self) -> int:
        """Responses of the fullest engine."""
        return -(-self.num_rollouts // self.num_engines)


@lru_cache(maxsize=64)  # every draw of a projection asks for the same few
def slowest_engine(lengths: Lengths, shape: RolloutShape) -> Trace:
    """The rollout of the engine that ends last: typical responses, and the longest of all engines'."""
    lengths_B = stratified(lengths, shape.per_engine, longest_of_count=shape.num_rollouts)
    return batch_continuously(lengths_B, prompt_tokens=shape.prompt_tokens)


def batch_continuously(lengths_B: Array, *, prompt_tokens: float) -> Trace:
    """Start sequences of `lengths_B` tokens together; each runs until it ends."""
    borders = np.unique(np.concatenate([[0.0], lengths_B]))
    ended_S = np.searchsorted(np.sort(lengths_B), borders[:-1], side="right")
    batch_S = (len(lengths_B) - ended_S).astype(np.float64)
    middle_S = 0.5 * (borders[1:] + borders[:-1])
    return Trace(tokens_S=np.diff(borders), batch_S=batch_S, context_S=batch_S * (prompt_tokens + middle_S))


def steady_state(lengths: Lengths, *, running_S: Array, prompt_tokens: float) -> Trace:
    """Engines that are never drained: `running_S` sequences at all times, each span one mean response long.

    The spans are alternatives, one an entry of `running_S`. A sequence is met in proportion to its length and half-way
    through on average, so the mean context is prompt + E[L^2] / (2 E[L]).
    """
    mean = lengths.mean_tokens
    context = prompt_tokens + lengths.mean_square_tokens / (2.0 * mean)
    return Trace(tokens_S=np.full_like(running_S, mean), batch_S=running_S, context_S=running_S * context)
