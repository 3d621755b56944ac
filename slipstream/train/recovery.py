"""Engines that outlive the loss of one: it is replaced and refitted, and what the loop asked for is asked again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import Engine, GenerationResult
from slipstream.records.steps import RefitCheck
from slipstream.refit.gate import Export
from slipstream.types import Prompt
from slipstream.workers.calls import LostWorkerError, Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReplaceableEngines(Engine, Protocol):
    """Engines of which single ones can be replaced."""

    @property
    def engines(self) -> Sequence[Worker]:
        """Where they run."""
        ...

    def replace(self, lost: Sequence[Worker]) -> None:
        """Start another one in the place of each of `lost`."""
        ...


class Gate(Protocol):
    """What `RefitGate` does."""

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        """Bring all engines to the learner's present weights."""
        ...

    def export(self, version: int, *, draft_version: int | None) -> Export:
        """The learner's part of that."""
        ...

    def deliver(self, export: Export) -> RefitCheck:
        """The engines' part of it."""
        ...

    def deliver_again(self, version: int) -> bool:
        """Bring new engines to the weights of the last refit, whatever the learner has now; False: it cannot."""
        ...

    def engines_changed(self) -> None:
        """Take note of new engines."""
        ...


class WeightsLostError(RuntimeError):
    """Engines were replaced, and the weights that they should generate with are nowhere any more."""


class LastingEngines:
    """What the loop sees of the engines and of the gate: to it none is ever lost, until too many were.

    A step's rollouts are drawn again by all engines, from the same seed and weights: the step is the one that it would
    have been. A lost rank of the learner is not recovered here, for its weights are gone.

    Args:
        is_beside_training: while the engines generate the learner may have other weights than they should.
    """

    def __init__(
        self, engines: ReplaceableEngines, gate: Gate, *, max_restarts: int, is_beside_training: bool = False
    ) -> None:
        self._engines = engines
        self._gate = gate
        self._max_restarts = max_restarts
        self._is_beside_training = is_beside_training
        self._num_restarts = 0
        self._num_reported = 0
        self._version = 0
        self._draft_version: int | None = None

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        """See `RefitGate.refit`.

        Raises:
            LostWorkerError: more engines were lost than may be, or a rank of the learner.
        """
        self._version, self._draft_version = version, draft_version
        return self._lasting(self._refit, refit_anew=False)

    def export(self, version: int, *, draft_version: int | None) -> Export:
        """See `RefitGate.export`: no engine takes part."""
        return self._gate.export(version, draft_version=draft_version)

    def deliver(self, export: Export) -> RefitCheck:
        """See `RefitGate.deliver`; errors as of `refit`. The same weights again, if an engine was lost meanwhile."""
        self._version, self._draft_version = export.version, export.draft_version
        return self._lasting(lambda: self._gate.deliver(export), refit_anew=False)

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """See `Engine.generate`; errors as of `refit`.

        Raises:
            WeightsLostError: an engine was replaced while the learner trained, and the channel keeps no weights.
        """
        num_asked = 0

        def generate() -> GenerationResult:
            nonlocal num_asked
            num_asked += 1
            return self._engines.generate(prompts, sampling=sampling, group_size=group_size, seed=seed)

        result = self._lasting(generate, refit_anew=True)
        num_restarts = self._num_restarts - self._num_reported
        self._num_reported = self._num_restarts
        num_regenerated = (num_asked - 1) * len(prompts) * group_size
        return replace(result, num_engine_restarts=num_restarts, num_regenerated=num_regenerated)

    def _refit(self) -> RefitCheck:
        return self._gate.refit(self._version, draft_version=self._draft_version)

    def _refit_anew(self) -> None:
        if not self._is_beside_training:
            self._refit()
        elif not self._gate.deliver_again(self._version):
            raise WeightsLostError(
                f"no engine can be given policy version {self._version} again: the learner has left it"
            )

    def _lasting(self, call: Callable[[], T], *, refit_anew: bool) -> T:
        lost: Sequence[Worker] = ()
        replaced = False
        while True:
            try:
                if lost:
                    self._engines.replace(lost)
                    self._gate.engines_changed()
                    lost, replaced = (), True
                if replaced and refit_anew:
                    self._refit_anew()
                return call()
            except LostWorkerError as error:  # of those that take the place of lost ones too
                lost = self._replaceable(error)

    def _replaceable(self, error: LostWorkerError) -> Sequence[Worker]:
        """The lost engines, counted; raises the error if they may not be replaced."""
        running = [engine.name for engine in self._engines.engines]
        lost = [worker for worker in error.workers if worker.name in running]
        if len(lost) < len(error.workers) or self._num_restarts + len(lost) > self._max_restarts:
            raise error
        self._num_restarts += len(lost)
        logger.error("%s; restart %d of at most %d in this run", error, self._num_restarts, self._max_restarts)
        return lost
