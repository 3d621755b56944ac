"""Scheduling of groups over engines, for generation that waits for its batch and for generation in flight.

A generation that waits for its batch assigns the longest groups first, each to the engine with the least load. Groups
without room are queued, and an engine takes from the queue as soon as it has room. Assignment alone would leave an
engine idle when its responses end early. A queue alone would fill up the first engine that asks. Generation in flight
assigns each group to the engine with the fewest rollouts, and a ledger holds the groups that are not complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from slipstream.engine.acceptance import combine
from slipstream.engine.protocol import GenerationResult, GroupRequest, Portion, summed
from slipstream.types import Prompt, RolloutGroup

_TOKENS_PER_KIND = 8  # width of a bin of prompt lengths
_NEW = 0.25  # weight of the newest group in a moving mean, as lengths drift while the policy learns

H = TypeVar("H", bound=Hashable)


@dataclass
class SeenLengths:
    """Response lengths seen so far, in tokens, as a forecast for a prompt's next rollouts.

    The forecast is the prompt's last length. A new prompt gets the moving mean of its kind (prompts of about the same
    length), else the moving mean of all prompts. Without any seen response all forecasts are equal.
    """

    _by_prompt: dict[str, float] = field(default_factory=dict)
    _by_kind: dict[int, float] = field(default_factory=dict)
    _mean: float | None = None

    def note(self, groups: Iterable[RolloutGroup]) -> None:
        """Add the response lengths of these groups."""
        for group in groups:
            length = sum(len(rollout.token_ids) for rollout in group.rollouts) / len(group.rollouts)
            kind = _kind(group.prompt)
            self._by_prompt[group.prompt.id] = length
            self._by_kind[kind] = _moved(self._by_kind.get(kind), length)
            self._mean = _moved(self._mean, length)

    def expected(self, prompt: Prompt) -> float:
        """Forecast the tokens of one response."""
        fallback = 1.0 if self._mean is None else self._mean
        return self._by_prompt.get(prompt.id, self._by_kind.get(_kind(prompt), fallback))


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """Groups that each engine starts with, and a queue of groups without room, longest first."""

    shares: tuple[tuple[GroupRequest, ...], ...]
    queue: tuple[GroupRequest, ...]


def deal(requests: Sequence[GroupRequest], lengths: SeenLengths, *, num_engines: int, num_slots: int | None) -> Deal:
    """Assign the longest groups first, each to the engine with room that has the fewest expected tokens.

    Args:
        num_slots: rollouts that an engine runs at once; None sets no limit. A larger group gets an engine of its own
            and waits in that engine.
    """

    def tokens(request: GroupRequest) -> float:
        return len(request.seeds) * lengths.expected(request.prompt)

    shares: list[list[GroupRequest]] = [[] for _ in range(num_engines)]
    loads = [0.0] * num_engines
    queue = []
    for request in sorted(requests, key=tokens, reverse=True):
        open_to = [i for i in range(num_engines) if _fits(request, shares[i], num_slots)]
        if queue or not open_to:
            queue.append(request)  # and all shorter groups after it
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


def gather(
    dealt: Deal,
    *,
    start: Callable[[int, tuple[GroupRequest, ...], bool, int | None], H],
    wait: Callable[[Sequence[H]], tuple[H, Portion]],
) -> list[list[Portion]]:
    """Generate the assigned groups and the queue; an engine gets its next group as soon as it has room.

    All engines compute at the same time, each with one call at a time. Returns the portions of each engine in the order
    of its calls.

    Args:
        start: starts a call of `VllmEngine.generate` on the engine of this number, with the requests, `is_first` and
            `room_for`; returns at once.
        wait: waits for the call that ends first; returns the call and its result.
    """
    queue = deque(dealt.queue)
    portions: list[list[Portion]] = [[] for _ in dealt.shares]
    missing = [0] * len(dealt.shares)  # groups in flight on each engine
    running: dict[H, int] = {}

    def call(engine: int, requests: tuple[GroupRequest, ...], *, is_first: bool) -> None:
        missing[engine] += len(requests)
        room_for = len(queue[0].seeds) if queue else None
        running[start(engine, requests, is_first, room_for)] = engine

    for engine, share in enumerate(dealt.shares):
        if share:
            call(engine, share, is_first=True)
    while running:
        done, portion = wait(list(running))
        engine = running.pop(done)
        portions[engine].append(portion)
        missing[engine] -= len(portion.groups)
        if queue:
            call(engine, (queue.popleft(),), is_first=False)
        elif missing[engine]:
            call(engine, (), is_first=False)
    return portions


def joined(requests: Sequence[GroupRequest], portions: Sequence[Sequence[Portion]]) -> GenerationResult:
    """Join the engines' portions into the result of a generation, with the groups in the order of the requests."""
    whole = together([part for engine in portions for part in engine], num_engines=len(portions))
    groups = dict(whole.groups)
    generation_s = max(engine[-1].ended_s - engine[0].started_s for engine in portions if engine)
    return GenerationResult(
        groups=tuple(groups[request.index] for request in requests),
        acceptance=whole.acceptance,
        generation_s=generation_s,
        engine_idle_fraction=1.0 - whole.ended_s / generation_s if len(portions) > 1 else 0.0,
        running=whole.running,
        num_preemptions=whole.num_preemptions,
    )


def together(portions: Sequence[Portion], *, num_engines: int) -> Portion:
    """Join portions of several engines or calls into one."""
    known = [portion.acceptance for portion in portions if portion.acceptance is not None]
    worked_s = sum(portion.ended_s - portion.started_s for portion in portions)
    return Portion(
        groups=tuple(entry for portion in portions for entry in portion.groups),
        acceptance=combine(known) if known else None,
        started_s=0.0,
        ended_s=worked_s / num_engines,
        running=summed(time for portion in portions for time in portion.running),
        num_regenerated=sum(portion.num_regenerated for portion in portions),
        num_engine_restarts=sum(portion.num_engine_restarts for portion in portions),
        num_preemptions=sum(portion.num_preemptions for portion in portions),
    )


class Ledger:
    """Groups in flight, with the engine that each was assigned to, in the order of submission."""

    def __init__(self) -> None:
        self._placed: dict[int, tuple[str, GroupRequest]] = {}

    @property
    def requests(self) -> tuple[GroupRequest, ...]:
        """All groups in flight."""
        return tuple(request for _, request in self._placed.values())

    def place(self, requests: Iterable[GroupRequest], engines: Sequence[str]) -> dict[str, list[GroupRequest]]:
        """Assign each group to the engine with the fewest rollouts; returns the new groups of each engine."""
        loads = {engine: sum(len(request.seeds) for request in self.of(engine)) for engine in engines}
        given: dict[str, list[GroupRequest]] = {}
        for request in requests:
            assert request.index not in self._placed, f"group {request.index} is under way already"
            engine = min(engines, key=lambda name: loads[name])
            loads[engine] += len(request.seeds)
            self._placed[request.index] = (engine, request)
            given.setdefault(engine, []).append(request)
        return given

    def of(self, engine: str) -> tuple[GroupRequest, ...]:
        """Groups in flight on this engine."""
        return tuple(request for name, request in self._placed.values() if name == engine)

    def reseed(
        self, indices: Collection[int], seeds: Callable[[GroupRequest], tuple[int, ...]]
    ) -> dict[str, dict[int, tuple[int, ...]]]:
        """Change the seeds of the groups that are in flight; returns the new seeds by engine and group."""
        told: dict[str, dict[int, tuple[int, ...]]] = {}
        for index in indices:
            if index not in self._placed:
                continue
            engine, request = self._placed[index]
            self._placed[index] = engine, replace(request, seeds=seeds(request))
            told.setdefault(engine, {})[index] = self._placed[index][1].seeds
        return told

    def complete(self, indices: Iterable[int]) -> None:
        """Remove groups that are complete."""
        for index in indices:
            del self._placed[index]

    def take(self, engines: Collection[str]) -> tuple[GroupRequest, ...]:
        """Remove and return the groups in flight on these engines."""
        lost = tuple(request for name, request in self._placed.values() if name in engines)
        self.complete(request.index for request in lost)
        return lost
