"""Which engine has which groups under way, as their driver knows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from slipstream.engine.requests import GroupRequest


class Ledger:
    """Groups that were submitted and did not come back, by the engine that has them, in the order of submission."""

    def __init__(self) -> None:
        self._placed: dict[int, tuple[str, GroupRequest]] = {}

    @property
    def requests(self) -> tuple[GroupRequest, ...]:
        """All of them."""
        return tuple(request for _, request in self._placed.values())

    def place(self, requests: Iterable[GroupRequest], engines: Sequence[str]) -> dict[str, list[GroupRequest]]:
        """Give each group to the engine that has the fewest rollouts; what each gets."""
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
        """What this engine has."""
        return tuple(request for name, request in self._placed.values() if name == engine)

    def reseed(
        self, indices: Collection[int], seeds: Callable[[GroupRequest], tuple[int, ...]]
    ) -> dict[str, dict[int, tuple[int, ...]]]:
        """Give these groups other seeds, if they are under way; by engine and group, what each must be told."""
        told: dict[str, dict[int, tuple[int, ...]]] = {}
        for index in indices:
            if index not in self._placed:
                continue
            engine, request = self._placed[index]
            self._placed[index] = engine, replace(request, seeds=seeds(request))
            told.setdefault(engine, {})[index] = self._placed[index][1].seeds
        return told

    def complete(self, indices: Iterable[int]) -> None:
        """These groups came back."""
        for index in indices:
            del self._placed[index]

    def take(self, engines: Collection[str]) -> tuple[GroupRequest, ...]:
        """What these engines had, and lost."""
        lost = tuple(request for name, request in self._placed.values() if name in engines)
        self.complete(request.index for request in lost)
        return lost
