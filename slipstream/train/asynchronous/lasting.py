"""Engines in flight that outlive the loss of one: what it had under way starts anew on the one in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import InFlightEngine, Portion
from slipstream.engine.requests import GroupRequest
from slipstream.records.steps import RefitCheck
from slipstream.refit.gate import Export
from slipstream.train.recovery import Gate, LastingEngines, ReplaceableEngines
from slipstream.workers.calls import LostWorkerError, Worker

T = TypeVar("T")


class ReplaceableInFlight(ReplaceableEngines, InFlightEngine, Protocol):
    """Engines in flight of which single ones can be replaced."""


class LastingInFlight(LastingEngines):
    """What the loop in flight sees of the engines and of the gate: see `FlyingEngines` there.

    Others go on with what they have. A group whose engine was lost is drawn again as a whole, from its seeds and the
    present weights, and counted.
    """

    def __init__(
        self, engines: ReplaceableInFlight, gate: Gate, *, sampling: SamplingConfig, max_restarts: int
    ) -> None:
        super().__init__(engines, gate, max_restarts=max_restarts, is_beside_training=True)
        self._flight = engines
        self._sampling = sampling
        self._num_regenerated = 0

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        """See `InFlightEngine.under_way`."""
        return self._flight.under_way

    def deliver(self, export: Export) -> RefitCheck:
        """See `RefitGate.deliver`; errors as of `LastingEngines.refit`."""
        self._version, self._draft_version = export.version, export.draft_version
        return self._flying(lambda: self._gate.deliver(export), is_refit=True)

    def submit(self, requests: Sequence[GroupRequest], *, sampling: SamplingConfig) -> None:
        """See `InFlightEngine.submit`; errors as of `generate`."""
        to_do = [requests]  # once: what an engine that is lost was given is known as its own

        def submit() -> None:
            if to_do:
                self._flight.submit(to_do.pop(), sampling=sampling)

        self._flying(submit)

    def advance(self, *, max_s: float) -> Portion:
        """See `InFlightEngine.advance`; errors as of `generate`."""
        return self._flying(lambda: self._flight.advance(max_s=max_s))

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        """See `InFlightEngine.restart`; errors as of `generate`."""
        return self._flying(lambda: self._flight.restart(indices, seeds=seeds))

    def take_num_regenerated(self) -> int:
        """Rollouts that were started anew since the last call of this, for an engine was lost."""
        num, self._num_regenerated = self._num_regenerated, 0
        return num

    def _flying(self, call: Callable[[], T], *, is_refit: bool = False) -> T:
        """Make a call, again if an engine was lost in it: after the others have a new one beside them."""
        lost: Sequence[Worker] = ()
        replaced, stranded = False, []
        while True:
            try:
                if lost:
                    stranded += self._flight.take_lost([worker.name for worker in lost])
                    self._flight.replace(lost)
                    self._gate.engines_changed()
                    lost, replaced = (), True
                if is_refit:
                    result = call()
                    self._submit_again(stranded)
                    return result
                if replaced:
                    self._refit_anew()
                    replaced = False
                self._submit_again(stranded)
                return call()
            except LostWorkerError as error:
                lost = self._replaceable(error)

    def _submit_again(self, stranded: list[GroupRequest]) -> None:
        """What was under way on lost engines; if another is lost in this, it has it as its own."""
        requests = list(stranded)
        stranded.clear()
        if requests:
            self._num_regenerated += sum(len(request.seeds) for request in requests)
            self._flight.submit(requests, sampling=self._sampling)
