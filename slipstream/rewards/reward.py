"""Rewards: the built-in one for mathematics, or a function of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from slipstream.rewards.config import OverlongConfig
from slipstream.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """Rewards in the order of the responses; a response without one scored 0 and is counted."""

    rewards: tuple[float, ...]
    num_timeouts: int
    num_crashes: int
    num_failures: int = 0  # the function raised an error, or returned no finite number
    metrics: dict[str, float] = field(default_factory=dict)  # means of what a function returned beside the score


def joined(results: Sequence[RewardResult]) -> RewardResult:
    """Put results in one: a metric is the mean over the responses of those that have it."""
    if len(results) == 1:
        return results[0]
    totals: dict[str, list[tuple[float, int]]] = {}
    for result in results:
        for name, mean in result.metrics.items():
            totals.setdefault(name, []).append((mean, len(result.rewards)))
    return RewardResult(
        rewards=tuple(reward for result in results for reward in result.rewards),
        num_timeouts=sum(result.num_timeouts for result in results),
        num_crashes=sum(result.num_crashes for result in results),
        num_failures=sum(result.num_failures for result in results),
        metrics={name: sum(m * n for m, n in found) / sum(n for _, n in found) for name, found in totals.items()},
    )


def penalized(
    result: RewardResult, lengths: Sequence[int], *, max_response_tokens: int, overlong: OverlongConfig
) -> RewardResult:
    """Subtract the penalty on responses that near their limit; the metric `overlong_penalty` is its mean.

    A response of n tokens loses `penalty` x (n - (limit - buffer)) / buffer where that is above 0.

    Source:
        Soft overlong punishment: DAPO, arXiv:2503.14476, equation 13.
    """
    buffer = overlong.buffer_tokens
    if not buffer or not lengths:
        return result
    penalties = [overlong.penalty * max(0, length - (max_response_tokens - buffer)) / buffer for length in lengths]
    return replace(
        result,
        rewards=tuple(reward - penalty for reward, penalty in zip(result.rewards, penalties, strict=True)),
        metrics={**result.metrics, "overlong_penalty": sum(penalties) / len(penalties)},
    )


class Reward(Protocol):
    """Scores responses. Not thread-safe."""

    def judge(self, prompts: Sequence[Prompt], responses: Sequence[str], *, cut_off: Sequence[bool]) -> RewardResult:
        """Score `responses[i]` to `prompts[i]`, with `<think>` before it where its prompt ends inside a thought.

        `cut_off` says which responses ran into their limit.
        """
        ...

    def gradable(self, references: Sequence[str], data_source: str = "") -> tuple[bool, ...]:
        """Check that responses can be scored against each reference of a data source."""
        ...

    def equal(self, pairs: Sequence[tuple[str, str]], data_source: str = "") -> tuple[bool, ...]:
        """Check that both references of each pair, of a data source, mean the same."""
        ...

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        ...
