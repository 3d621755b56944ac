"""Continuous batching over responses of unequal length: the running batch shrinks and the tail is exposed.

Sequences that run together advance together (each iteration gives each the same expected number of tokens), so the
schedule is a matter of tokens alone: it holds for any model, hardware and k, and is worked out once.

Key-value memory caps the sequences that run at once: those beyond it queue, and one starts where another has ended.

Legend: `B` sequences of one engine, `S` spans between two changes of the running batch.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from slipstream.simulator.cost import Array
from slipstream.simulator.cost.lengths import Lengths, stratified


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One engine's rollout: in each span `batch_S` sequences run until each has `tokens_S` tokens more."""

    tokens_S: Array
    batch_S: Array
    context_S: Array  # tokens in the key-value cache, all running sequences together, mean over the span


class Slots(StrEnum):
    """What makes room for another group while generation runs beside training."""

    RESPONSE = "response"  # each response that ends: the lag bound alone limits how many groups are under way
    GROUP = "group"  # a whole group that ends: at most prompts x lag groups run at once


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutShape:
    """How many responses a step has and over how many engines they are spread, at least one an engine."""

    num_rollouts: int
    num_engines: int
    prompt_tokens: float
    group_size: int = 1
    slots: Slots = Slots.RESPONSE
    cache_tokens: float = math.inf  # that the key-value memory of an engine holds

    @property
    def per_engine(self) -> int:
        """Responses of the fullest engine."""
        return -(-self.num_rollouts // self.num_engines)


def mean_context(lengths: Lengths, *, prompt_tokens: float) -> float:
    """Cached tokens of a running sequence, met at any time: the prompt and E[L^2] / (2 E[L]).

    A sequence is met in proportion to its length and half-way through on average.
    """
    return prompt_tokens + lengths.mean_square_tokens / (2.0 * lengths.mean_tokens)


def cached_sequences(lengths: Lengths, shape: RolloutShape) -> float:
    """Sequences of mean context that the key-value memory of an engine holds; at least one."""
    return max(1.0, shape.cache_tokens / mean_context(lengths, prompt_tokens=shape.prompt_tokens))


@lru_cache(maxsize=64)  # every draw of a projection asks for the same few
def slowest_engine(lengths: Lengths, shape: RolloutShape) -> Trace:
    """The rollout of the engine that ends last: typical responses, and the longest of all engines'."""
    lengths_B = stratified(lengths, shape.per_engine, longest_of_count=shape.num_rollouts)
    fitting = cached_sequences(lengths, shape)
    if fitting >= shape.per_engine:
        return batch_continuously(lengths_B, prompt_tokens=shape.prompt_tokens)
    shuffled_B = np.random.default_rng(0).permutation(lengths_B)  # nobody knows the long ones beforehand
    return batch_in_slots(shuffled_B, prompt_tokens=shape.prompt_tokens, num_slots=int(fitting))


def batch_in_slots(lengths_B: Array, *, prompt_tokens: float, num_slots: int) -> Trace:
    """Run sequences of `lengths_B` tokens in their order, `num_slots` at a time: one starts where another has ended."""
    free = [0.0] * min(num_slots, len(lengths_B))  # when each slot is free, in tokens since the start
    starts_B = np.empty(len(lengths_B))
    for index, length in enumerate(lengths_B.tolist()):
        starts_B[index] = free[0]
        heapq.heapreplace(free, free[0] + length)
    ends_B = starts_B + lengths_B
    borders = np.unique(np.concatenate([starts_B, ends_B]))
    middle_S = 0.5 * (borders[1:] + borders[:-1])
    runs_SB = (starts_B < middle_S[:, None]) & (middle_S[:, None] < ends_B)
    batch_S = runs_SB.sum(axis=1).astype(np.float64)
    return Trace(
        tokens_S=np.diff(borders),
        batch_S=batch_S,
        context_S=batch_S * (prompt_tokens + middle_S) - runs_SB @ starts_B,
    )


def batch_continuously(lengths_B: Array, *, prompt_tokens: float) -> Trace:
    """Start sequences of `lengths_B` tokens together; each runs until it ends."""
    borders = np.unique(np.concatenate([[0.0], lengths_B]))
    ended_S = np.searchsorted(np.sort(lengths_B), borders[:-1], side="right")
    batch_S = (len(lengths_B) - ended_S).astype(np.float64)
    middle_S = 0.5 * (borders[1:] + borders[:-1])
    return Trace(tokens_S=np.diff(borders), batch_S=batch_S, context_S=batch_S * (prompt_tokens + middle_S))


def steady_state(lengths: Lengths, *, running_S: Array, prompt_tokens: float) -> Trace:
    """Engines that are never drained: `running_S` sequences at all times, each span one mean response long.

    The spans are alternatives, one an entry of `running_S`.
    """
    context = mean_context(lengths, prompt_tokens=prompt_tokens)
    return Trace(
        tokens_S=np.full_like(running_S, lengths.mean_tokens), batch_S=running_S, context_S=running_S * context
    )
