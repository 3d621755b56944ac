"""Engines whose speculation is switched off where it measurably loses, and tried again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from slipstream.drafts.config import AutopilotConfig
from slipstream.drafts.length import Decision, constant, decide
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import AutopilotStep, ScheduleEntry
from slipstream.train.recovery import ReplaceableEngines
from slipstream.types import Prompt
from slipstream.workers.calls import Worker

logger = logging.getLogger(__name__)


class SwitchableEngines(ReplaceableEngines, Protocol):
    """Engines whose draft length can be changed while they live."""

    def draft_by(self, schedule: Sequence[ScheduleEntry]) -> None:
        """Draft by another table from the next generation on."""
        ...


class PilotedEngines:
    """Engines that draft as long as drafting pays: `slipstream.drafts.length` decides, before each generation.

    They stand below `LastingEngines`: an engine in the place of a lost one is told anew how to draft, and a generation
    that failed counts for nothing. What a step did travels in its record, so a resumed run takes up the same thread.

    Args:
        schedule: of the drafts, while there are any.
        steps: what the generations so far did.
    """

    def __init__(
        self,
        engines: SwitchableEngines,
        *,
        config: AutopilotConfig,
        schedule: Sequence[ScheduleEntry],
        steps: Iterable[AutopilotStep | None] = (),
    ) -> None:
        self._engines = engines
        self._config = config
        self._schedule = tuple(schedule)
        self._steps = [step for step in steps if step is not None]

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
        """See `Engine.generate`. A step that did not draft has no acceptance."""
        decision = decide(self._steps, self._config)
        self._engines.draft_by(self._schedule if decision.speculates else constant(0))
        result = self._engines.generate(prompts, sampling=sampling, group_size=group_size, seed=seed)
        num_tokens = sum(len(rollout.token_ids) for group in result.groups for rollout in group.rollouts)
        step = AutopilotStep(
            speculates=decision.speculates,
            is_probe=decision.is_probe,
            token_ms=1e3 * result.generation_s / num_tokens,
            has_switched=decision.has_switched,
        )
        if decision.has_switched:  # said once the generation that follows from it is done
            _announce(decision, self._config.patience_steps)
        self._steps.append(step)
        return replace(result, autopilot=step, acceptance=result.acceptance if decision.speculates else None)


def _announce(decision: Decision, patience_steps: int) -> None:
    own, other = (f"{cost:.3f} ms a token" for cost in (decision.own_ms or 0.0, decision.other_ms or 0.0))
    if decision.speculates:
        logger.warning("speculation is on again: probes of it took %s, generation without it %s", other, own)
    else:
        logger.warning(
            "speculation is off: for %d steps it lost, %s with it and %s without; it is probed from time to time",
            patience_steps,
            own,
            other,
        )
