"""Is it worth training the draft in this step? Seconds that it would save against seconds that it costs.

A policy that learns moves away from its draft, which is then accepted less. `Staleness` keeps what the steps so far
showed: the acceptance length of the last ones, the length that this draft is known to reach, and what its training
took. `decide` compares

    saved_s = horizon x generation_s x (1 - length / reachable length)   with   cost_s = median seconds of a training:

with the same tokens to generate, the number of verify iterations is inverse to the acceptance length, and each takes
what the last step's took. What counting noise explains is not a loss. All of it is a pure function of the steps'
records, so a resumed run decides as an uninterrupted one.

A training that brings no measurable gain proves nothing yet: on a policy that keeps moving it may have held acceptance
up. So after `PATIENCE` of them training pauses for up to `WINDOW` steps:

- acceptance falls faster than before: the draft was held up, and its training goes on;
- it does not fall: training rests, and the present length counts as the one that can be reached, until it falls below;
- it falls on as before: training goes on, with half the patience.

No rest is for ever, for a policy may have moved faster than its draft could follow, and stand still since. After `REST`
steps training tries again for the greatest length that there ever was; each rest is twice as long as the one before.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from slipstream.records.steps import AcceptanceStats, DraftDecision
from slipstream.rollout.acceptance import combine, sampling_deviation

WINDOW = 3
"""Steps whose acceptance counts as the present one: a lasting fall is seen whole after so many."""
PATIENCE = 6
"""Trainings without a gain after which a pause shows what they are worth."""
REST = 12
"""Steps after which training that was given up is tried again, at first."""
_LITTLE_PATIENCE = PATIENCE // 2
_NUM_DEVIATIONS = 2.0
_NUM_COSTS = 5
_FASTER = 1.5  # times as fast a fall is another one


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What happened since some step.

    Attributes:
        length: mean acceptance length then.
        pace: by how much it fell a step in the span before this one.
        num_steps: since then.
    """

    length: float
    pace: float = 0.0
    num_steps: int = 0

    def pace_to(self, length: float) -> float:
        """By how much acceptance fell a step, if it is `length` now; 0 if it rose."""
        return max(0.0, self.length - length) / max(1, self.num_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """What is known of a draft after some steps.

    Attributes:
        reference: mean acceptance length that the draft can reach, as far as is known; None: nothing is known yet.
        greatest: the largest `reference` that was given up.
        lowest: the smallest length since the last measurable gain.
        num_idle: trainings since the last measurable gain, or since the last pause.
        patience: how many of them lead to a pause.
        idle: since the first of them.
        pause: since training paused; None: it does not.
        num_rested: steps since it was given up; None: it was not, or was taken up again.
        rest: after how many of them it is tried again.
        is_warm: there was a training.
    """

    reference: float | None = None
    greatest: float = 0.0
    recent: tuple[AcceptanceStats, ...] = ()
    lowest: float = float("inf")
    num_idle: int = 0
    patience: int = PATIENCE
    idle: Span | None = None
    pause: Span | None = None
    num_rested: int | None = None
    rest: int = REST
    costs_s: tuple[float, ...] = ()
    is_warm: bool = False

    @property
    def length(self) -> float:
        """Mean acceptance length of the last steps together; 1 where nothing was drafted."""
        return combine(self.recent).mean_acceptance_length if self.recent else 1.0

    @property
    def noise(self) -> float:
        """By how much chance alone lets `length` fall."""
        return _NUM_DEVIATIONS * sampling_deviation(combine(self.recent)) if self.recent else 0.0

    def observed(self, acceptance: AcceptanceStats | None) -> Staleness:
        """After the rollouts of another step; None, or no drafts, tell nothing."""
        if acceptance is None or acceptance.num_drafts == 0:
            return self
        seen = replace(
            self, recent=(*self.recent, acceptance)[-WINDOW:], idle=_next(self.idle), pause=_next(self.pause)
        )
        length, noise = seen.length, seen.noise
        reference = length if seen.reference is None else max(seen.reference, length)
        seen = replace(seen, reference=reference)
        if length > self.lowest + noise or length >= reference:
            return replace(seen._fresh(), patience=PATIENCE)._rested()
        seen = replace(seen, lowest=min(self.lowest, length))._rested()
        return seen if seen.pause is None else seen._paused(seen.pause)

    def _rested(self) -> Staleness:
        """After another step; at the end of a rest the greatest length is to be reached again."""
        if self.num_rested is None:
            return self
        if self.num_rested + 1 < self.rest:
            return replace(self, num_rested=self.num_rested + 1)
        reference = max(self.length, self.greatest)
        tried_again = replace(self._fresh(), reference=reference, patience=PATIENCE)
        return replace(tried_again, num_rested=None, rest=2 * self.rest)

    def _paused(self, pause: Span) -> Staleness:
        """What another step of a pause shows."""
        length, noise = self.length, self.noise
        if pause.length - length > _FASTER * pause.pace * pause.num_steps + noise:
            return replace(self._fresh(), patience=PATIENCE)  # it was held up
        if pause.num_steps < WINDOW:
            return self
        given_up = replace(self._fresh(), patience=_LITTLE_PATIENCE)
        if length < pause.length - noise:
            return given_up
        greatest = max(self.greatest, self.reference or 0.0)
        return replace(given_up, reference=length, greatest=greatest, num_rested=self.num_rested or 0)

    def _fresh(self) -> Staleness:
        """With nothing held against its trainings."""
        return replace(self, lowest=self.length, num_idle=0, idle=None, pause=None)

    def trained(self, training_s: float) -> Staleness:
        """After the same step trained the draft, which took so many seconds."""
        # The first one pays for first allocations and cold caches.
        costs_s = (*self.costs_s, training_s)[-_NUM_COSTS:] if self.is_warm else ()
        idle = self.idle or Span(length=self.length)
        seen = replace(self, costs_s=costs_s, is_warm=True, num_idle=self.num_idle + 1, idle=idle)
        if seen.num_idle < seen.patience or seen.pause is not None:
            return seen
        return replace(seen, pause=Span(length=seen.length, pace=idle.pace_to(seen.length)))

    def decide(self, *, generation_s: float, horizon_steps: int) -> DraftDecision:
        """Whether to train the draft now.

        Args:
            generation_s: of the last step.
            horizon_steps: for which a training is expected to last; 0: no step is left.
        """
        length = self.length
        reference = length if self.reference is None else self.reference
        lost = max(0.0, 1.0 - length / max(reference - self.noise, 1.0))
        saved_s = horizon_steps * generation_s * lost
        cost_s = statistics.median(self.costs_s) if self.costs_s else None
        pays = saved_s > (cost_s or 0.0)
        trains = pays and self.pause is None
        reason = "it pays" if pays else "it costs more than it saves"
        if saved_s == 0.0:
            reason = "nothing is lost" if self.num_rested is None else "the last trainings gained nothing"
        if pays and not trains:
            reason = "a pause shows what training is worth"
        return DraftDecision(
            trains=trains,
            reason="its cost is not known yet" if trains and cost_s is None else reason,
            length=length,
            reference_length=reference,
            saved_s=saved_s,
            cost_s=cost_s,
        )


def _next(span: Span | None) -> Span | None:
    return None if span is None else replace(span, num_steps=span.num_steps + 1)
