"""Engines in processes of their own whose rollouts go on while new weights enter."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Portion
from slipstream.engine.requests import GroupRequest
from slipstream.grpo.loop_config import KvCache
from slipstream.workers.calls import Crew, LostWorkerError, Worker
from slipstream.workers.gathering import together
from slipstream.workers.ledger import Ledger

_SLICE_S = 0.25  # of several engines: none can be told to stop because another has completed a group


class InFlightEngines:
    """What `slipstream.engine.protocol.InFlightEngine` asks of engines in actors.

    No call is left under way: between two of them every engine is at rest, so a refit that another process steers comes
    between two steps of all of them.
    """

    def __init__(self, crew: Crew) -> None:
        """Speak to engines that run."""
        self._crew = crew
        self._kv_cache: KvCache | None = None
        self._ledger = Ledger()
        self._held: list[Portion] = []  # of a call in which another engine was lost

    def run_in_flight(self, kv_cache: KvCache | None) -> None:
        """See `VllmEngine.run_in_flight`; all engines, and those that take the place of lost ones."""
        self._kv_cache = kv_cache
        self._ledger = Ledger()
        self._held = []
        self._crew.ask("a change of mode", lambda engine: engine.run_in_flight.remote(kv_cache))

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig) -> None:
        """See `InFlightEngine.submit`; on an engine that is lost, what it was given is known as its own."""
        given = self._ledger.place(requests, [worker.name for worker in self._crew.workers])
        calls = [
            (worker, worker.actor.submit.remote(given[worker.name], sampling=sampling))
            for worker in self._crew.workers
            if worker.name in given
        ]
        self._crew.gather("submitting groups", calls)

    def advance(self, *, max_s: float) -> Portion:
        """See `InFlightEngine.advance`."""
        end_s = time.monotonic() + max_s
        portions, self._held = self._held, []
        while self._ledger.requests and not any(portion.groups for portion in portions):
            try:
                portions += self._slice(max(0.0, end_s - time.monotonic()))
            except LostWorkerError:
                self._held = portions + self._held
                raise
            if time.monotonic() >= end_s:
                break
        return together(portions, num_engines=len(self._crew.workers))

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        """See `InFlightEngine.restart`."""
        told = self._ledger.reseed(indices, seeds)
        calls = [
            (worker, worker.actor.restart.remote(told[worker.name]))
            for worker in self._crew.workers
            if worker.name in told
        ]
        return sum(self._crew.gather("starting rollouts anew", calls))

    def take_lost(self, names: Collection[str]) -> tuple[GroupRequest, ...]:
        """See `InFlightEngine.take_lost`."""
        return self._ledger.take(names)

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        """See `InFlightEngine.under_way`."""
        return self._ledger.requests

    def _slice(self, max_s: float) -> list[Portion]:
        """Run every engine that has work, until one of one or all of several have had their time."""
        is_alone = len(self._crew.workers) == 1
        arguments = {"max_s": max_s if is_alone else min(max_s, _SLICE_S), "stops_at_first": is_alone}
        calls = [
            (worker, worker.actor.advance.remote(**arguments))
            for worker in self._crew.workers
            if self._ledger.of(worker.name)
        ]
        portions, lost = self._answers(calls)
        self._ledger.complete(index for portion in portions for index, _ in portion.groups)
        if lost:
            self._held = portions
            raise LostWorkerError("; ".join(map(str, lost)), [worker for error in lost for worker in error.workers])
        return portions

    def _answers(self, calls: Sequence[tuple[Worker, Any]]) -> tuple[list[Portion], list[LostWorkerError]]:
        """Of each engine by itself: what one completed is there although another died."""
        portions: list[Portion] = []
        lost: list[LostWorkerError] = []
        for call in calls:
            try:
                portions += self._crew.gather("generation in flight", [call])
            except LostWorkerError as error:
                lost.append(error)
        return portions, lost
