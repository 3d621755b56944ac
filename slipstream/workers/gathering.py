"""One generation over several engines: what was dealt is started, the queue is handed out, the parts are joined."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from slipstream.engine.acceptance import combine
from slipstream.engine.protocol import GenerationResult, Portion, RunningTime
from slipstream.engine.requests import GroupRequest
from slipstream.workers.dealing import Deal

H = TypeVar("H", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What an engine is told: `VllmEngine.generate`'s arguments."""

    requests: tuple[GroupRequest, ...]
    is_first: bool
    room_for: int | None


class Engines(Protocol, Generic[H]):
    """Engines that work at the same time, each on one call at a time."""

    def start(self, engine: int, call: Call) -> H:
        """Hand a call to an engine; returns at once."""
        ...

    def wait(self, calls: Sequence[H]) -> tuple[H, Portion]:
        """The call that ends first, and its result."""
        ...


def gather(engines: Engines[H], dealt: Deal) -> list[list[Portion]]:
    """Generate what was dealt, and the queue: an engine gets its next group as soon as it has room.

    Returns:
        The portions of each engine, in the order in which it made them.
    """
    queue = deque(dealt.queue)
    portions: list[list[Portion]] = [[] for _ in dealt.shares]
    missing = [0] * len(dealt.shares)  # groups that an engine has and did not return
    running: dict[H, int] = {}

    def start(engine: int, requests: tuple[GroupRequest, ...], *, is_first: bool) -> None:
        missing[engine] += len(requests)
        room_for = len(queue[0].seeds) if queue else None
        running[engines.start(engine, Call(requests=requests, is_first=is_first, room_for=room_for))] = engine

    for engine, share in enumerate(dealt.shares):
        if share:
            start(engine, share, is_first=True)
    while running:
        call, portion = engines.wait(list(running))
        engine = running.pop(call)
        portions[engine].append(portion)
        missing[engine] -= len(portion.groups)
        if queue:
            start(engine, (queue.popleft(),), is_first=False)
        elif missing[engine]:
            start(engine, (), is_first=False)
    return portions


def joined(requests: Sequence[GroupRequest], portions: Sequence[Sequence[Portion]]) -> GenerationResult:
    """The result of a generation from the engines' portions: the groups in the order of the requests."""
    parts = [part for engine in portions for part in engine]
    groups = dict(entry for part in parts for entry in part.groups)
    known = [part.acceptance for part in parts if part.acceptance is not None]
    generation_s = max(engine[-1].ended_s - engine[0].started_s for engine in portions if engine)
    worked_s = sum(part.ended_s - part.started_s for part in parts)
    return GenerationResult(
        groups=tuple(groups[request.index] for request in requests),
        acceptance=combine(known) if known else None,
        generation_s=generation_s,
        engine_idle_fraction=1.0 - worked_s / (len(portions) * generation_s) if len(portions) > 1 else 0.0,
        running=_running(parts),
    )


def together(portions: Sequence[Portion], *, num_engines: int) -> Portion:
    """What engines did at the same time, or one after the other: see `Portion`."""
    known = [portion.acceptance for portion in portions if portion.acceptance is not None]
    worked_s = sum(portion.ended_s - portion.started_s for portion in portions)
    return Portion(
        groups=tuple(entry for portion in portions for entry in portion.groups),
        acceptance=combine(known) if known else None,
        started_s=0.0,
        ended_s=worked_s / num_engines,
        running=_running(portions),
    )


def _running(parts: Sequence[Portion]) -> tuple[RunningTime, ...]:
    """The engines' steps by the running batch of the engine that made them."""
    found: dict[int, RunningTime] = {}
    for time in (time for part in parts for time in part.running):
        found[time.num_running] = found[time.num_running].plus(time) if time.num_running in found else time
    return tuple(found[num] for num in sorted(found))
