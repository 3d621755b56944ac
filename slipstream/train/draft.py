"""The draft of an arm from step to step: which version of it the engines must hold, and which steps train it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from slipstream.drafts.config import DraftConfig, DraftOnline
from slipstream.drafts.controller import Staleness
from slipstream.engine.protocol import GenerationResult
from slipstream.records.steps import DraftDecision, StepRecord


@dataclass(frozen=True, kw_only=True)
class FixedDraft:
    """A draft that stays as it was pretrained, or none: then `version` is None."""

    version: int | None = None

    def decide(self, result: GenerationResult, *, num_steps_left: int) -> DraftDecision | None:
        """There is nothing to decide."""

    def note(self, record: StepRecord) -> None:
        """It stays as it is."""


class TrainedDraft:
    """A draft that learns beside the policy.

    Attributes:
        version: 0 is the pretrained draft, and each step that trains it makes the next one.
    """

    def __init__(self, config: DraftConfig, *, reference: float | None, history: Iterable[StepRecord] = ()) -> None:
        """Go on after the steps of `history`.

        Args:
            reference: mean acceptance length that it reached before RL; None where nobody knows.
        """
        self.version = 0
        self._always = config.online is DraftOnline.ALWAYS
        self._horizon_steps = config.online_horizon_steps
        self._staleness = Staleness(reference=reference)
        for record in history:
            generation_s = 0.0 if record.draft_decision is None else record.draft_decision.generation_s
            self._staleness = self._staleness.observed(record.acceptance, generation_s)
            self.note(record)

    def decide(self, result: GenerationResult, *, num_steps_left: int) -> DraftDecision | None:
        """Whether the step of these rollouts trains the draft, and why; each step is asked once.

        Args:
            num_steps_left: after this one.
        """
        self._staleness = self._staleness.observed(result.acceptance, result.generation_s)
        horizon_steps = min(self._horizon_steps, num_steps_left)
        decision = self._staleness.decide(generation_s=result.generation_s, horizon_steps=horizon_steps)
        return replace(decision, trains=True, reason="always") if self._always else decision

    def note(self, record: StepRecord) -> None:
        """Count what the step did."""
        if record.draft_update is not None:
            self._staleness = self._staleness.trained(record.draft_update.elapsed_s)
            self.version += 1
