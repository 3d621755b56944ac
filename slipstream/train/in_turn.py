"""Learner and engines on the same GPUs, of which each gives memory back before the others' turn.

A step goes: the learner gives back its gradients and its optimizer's state, then engines are refitted and generate,
then they give back their caches, then the learner trains. Whoever is asked to work takes what it needs by itself, so
that a failure in between leaves nobody without it. The learner gives back before the refit, not after: an engine that
is lost in a refit starts anew, and measures the memory that is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import RefitCheck
from slipstream.refit.gate import Export
from slipstream.train.recovery import Gate, ReplaceableEngines
from slipstream.types import Prompt
from slipstream.workers.calls import Worker


class Resting(Protocol):
    """Who gives memory back until it works again."""

    def rest(self) -> None:
        """Give it back; nothing if that was done before."""
        ...


class GateInTurn:
    """A refit gate before which the learner gives memory back. Its weights, which a refit reads, stay."""

    def __init__(self, gate: Gate, learner: Resting) -> None:
        self._gate = gate
        self._learner = learner

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        """See `RefitGate.refit`."""
        self._learner.rest()
        return self._gate.refit(version, draft_version=draft_version)

    def export(self, version: int, *, draft_version: int | None) -> Export:
        """See `RefitGate.export`."""
        self._learner.rest()
        return self._gate.export(version, draft_version=draft_version)

    def deliver(self, export: Export) -> RefitCheck:
        """See `RefitGate.deliver`."""
        return self._gate.deliver(export)

    def deliver_again(self, version: int) -> bool:
        """See `RefitGate.deliver_again`."""
        return self._gate.deliver_again(version)

    def engines_changed(self) -> None:
        """See `RefitGate.engines_changed`."""
        self._gate.engines_changed()


class EnginesInTurn:
    """Engines that give memory back after each generation.

    They stand below `LastingEngines`: one that is lost while it gives memory back is replaced like any other, and its
    substitute gives back with the rest when the generation is repeated.

    Args:
        resting: the same engines.
    """

    def __init__(self, engines: ReplaceableEngines, resting: Resting) -> None:
        self._engines = engines
        self._resting = resting

    @property
    def engines(self) -> Sequence[Worker]:
        """See `ReplaceableEngines`."""
        return self._engines.engines

    def replace(self, lost: Sequence[Worker]) -> None:
        """See `ReplaceableEngines`."""
        self._engines.replace(lost)

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """See `Engine.generate`."""
        result = self._engines.generate(prompts, sampling=sampling, group_size=group_size, seed=seed)
        self._resting.rest()
        return result
