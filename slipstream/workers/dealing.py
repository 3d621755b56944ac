"""Which engine gets which prompts: longest first, to the engine with the least to do; what has no room yet is queued.

Engines take from the queue as soon as they have room for a group (`slipstream.workers.gathering`), so none is idle
while a group waits. Dealing alone would leave an engine idle when its prompts end early; a queue alone would give the
first engine that asks everything it has room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.engine.requests import GroupRequest
from slipstream.types import Prompt, RolloutGroup

_TOKENS_PER_KIND = 8  # prompts whose lengths differ by less are of one kind
_NEW = 0.25  # weight of the newest group in a mean: lengths drift while the policy learns


@dataclass
class SeenLengths:
    """Response lengths seen so far, in tokens: what a prompt's next rollouts are expected to take.

    A prompt that was seen takes what it took last, another one the mean of its kind (prompts of about its length), or
    of all prompts; before any was seen all are expected to be equal.
    """

    _by_prompt: dict[str, float] = field(default_factory=dict)
    _by_kind: dict[int, float] = field(default_factory=dict)
    _mean: float | None = None

    def note(self, groups: Iterable[RolloutGroup]) -> None:
        """Remember how long these responses were."""
        for group in groups:
            length = sum(len(rollout.token_ids) for rollout in group.rollouts) / len(group.rollouts)
            kind = _kind(group.prompt)
            self._by_prompt[group.prompt.id] = length
            self._by_kind[kind] = _moved(self._by_kind.get(kind), length)
            self._mean = _moved(self._mean, length)

    def expected(self, prompt: Prompt) -> float:
        """Tokens of one response."""
        fallback = 1.0 if self._mean is None else self._mean
        return self._by_prompt.get(prompt.id, self._by_kind.get(_kind(prompt), fallback))


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """What each engine starts with, and what waits for room, longest first."""

    shares: tuple[tuple[GroupRequest, ...], ...]
    queue: tuple[GroupRequest, ...]


def deal(requests: Sequence[GroupRequest], lengths: SeenLengths, *, num_engines: int, num_slots: int | None) -> Deal:
    """Longest first, each to the engine with the fewest expected tokens of those with room for it.

    Args:
        num_slots: rollouts that run at once on an engine; None: as many as there are. A group that is larger is dealt
            to an engine of its own and waits there.
    """

    def tokens(request: GroupRequest) -> float:
        return len(request.seeds) * lengths.expected(request.prompt)

    shares: list[list[GroupRequest]] = [[] for _ in range(num_engines)]
    loads = [0.0] * num_engines
    queue = []
    for request in sorted(requests, key=tokens, reverse=True):
        open_to = [i for i in range(num_engines) if _fits(request, shares[i], num_slots)]
        if queue or not open_to:
            queue.append(request)  # a shorter one does not overtake it
            continue
        engine = min(open_to, key=lambda i: loads[i])
        shares[engine].append(request)
        loads[engine] += tokens(request)
    return Deal(shares=tuple(map(tuple, shares)), queue=tuple(queue))


def _fits(request: GroupRequest, share: Sequence[GroupRequest], num_slots: int | None) -> bool:
    running = sum(len(other.seeds) for other in share)
    return num_slots is None or not share or running + len(request.seeds) <= num_slots


def _kind(prompt: Prompt) -> int:
    return len(prompt.token_ids) // _TOKENS_PER_KIND


def _moved(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _NEW * (value - mean)
