"""Is it worth training the draft in this step? Seconds that it would save against seconds that it costs.

A policy that learns moves away from its draft, which is then accepted less. `Staleness` keeps what the steps so far
showed: the acceptance length of the last ones, the length that this draft is known to reach, and what its training
took. `decide` compares

    saved_s = horizon x generation_s x (1 - length / reachable length)   with   cost_s = median seconds of a training:

with the same tokens to generate, the number of verify iterations is inverse to the acceptance length, and each takes
what the last step's took. What counting noise explains is not a loss. All of it is a pure function of the steps'
records, so a resumed run decides as an uninterrupted one.

That a training pays does not make it due, for the next step's could do the same. It is due

- when the seconds of generation that were lost since earlier trainings come to what one takes, or
- at once, when the length falls below what it was at the last training.

So a run spends on trainings what it loses for want of them, which is least in sum: where each training brings back a
share r of the loss, a policy that moves by d a step leaves a loss of g = d / (f r) at f trainings a step, and
f x cost_s + generation_s x g is least where both terms are equal, whatever r is.

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

from slipstream.engine.acceptance import combine, sampling_deviation
from slipstream.records.steps import AcceptanceStats, DraftDecision

WINDOW = 3
"""Steps whose acceptance counts as the present one: a lasting fall is seen whole after so many."""
PATIENCE = 12
"""Trainings without a gain after which a pause shows what they are worth.

So many bring back 30 % of a loss where each brings back 3 %, and that shows above the noise of a few steps.
"""
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
        lost_s: seconds of generation lost since earlier trainings, less what these took.
        held: the length at the last training; 0: there was none.
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
    lost_s: float = 0.0
    held: float = 0.0
    is_warm: bool = False

    @property
    def length(self) -> float:
        """Mean acceptance length of the last steps together; 1 where nothing was drafted."""
        return combine(self.recent).mean_acceptance_length if self.recent else 1.0

    @property
    def noise(self) -> float:
        """By how much chance alone lets `length` fall."""
        return _NUM_DEVIATIONS * sampling_deviation(combine(self.recent)) if self.recent else 0.0

    @property
    def lost(self) -> float:
        """Share of generation that goes because the draft is not what it can be; what chance explains is none."""
        reference = self.length if self.reference is None else self.reference
        return max(0.0, 1.0 - self.length / max(reference - self.noise, 1.0))

    @property
    def cost_s(self) -> float | None:
        """Of a training; None: not measured yet."""
        return statistics.median(self.costs_s) if self.costs_s else None

    def observed(self, acceptance: AcceptanceStats | None, generation_s: float) -> Staleness:
        """After the rollouts of another step, which took so long; None, or no drafts, tell nothing."""
        if acceptance is None or acceptance.num_drafts == 0:
            return self
        seen = self._seen(acceptance)
        return replace(seen, lost_s=seen.lost_s + generation_s * seen.lost)

    def _seen(self, acceptance: AcceptanceStats) -> Staleness:
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
        seen = replace(self, costs_s=costs_s, is_warm=True, num_idle=self.num_idle + 1, idle=idle, held=self.length)
        # What is left over counts for the next one, but for no more than that.
        cost_s = seen.cost_s or 0.0
        seen = replace(seen, lost_s=min(max(0.0, self.lost_s - cost_s), cost_s))
        if seen.num_idle < seen.patience or seen.pause is not None:
            return seen
        return replace(seen, pause=Span(length=seen.length, pace=idle.pace_to(seen.length)))

    def decide(self, *, generation_s: float, horizon_steps: int) -> DraftDecision:
        """Whether to train the draft now.

        Args:
            generation_s: of the last step.
            horizon_steps: for which a training is expected to last; 0: no step is left.
        """
        cost_s = self.cost_s
        saved_s = horizon_steps * generation_s * self.lost
        pays = saved_s > (cost_s or 0.0)
        is_due = self.lost_s >= (cost_s or 0.0) or self.length < self.held - self.noise
        reason = "it pays"
        if saved_s == 0.0:
            reason = "nothing is lost" if self.num_rested is None else "the last trainings gained nothing"
        elif not pays:
            reason = "it costs more than it saves"
        elif self.pause is not None:
            reason = "a pause shows what training is worth"
        elif not is_due:
            reason = "less was lost since the last ones than one costs"
        elif cost_s is None:
            reason = "its cost is not known yet"
        return DraftDecision(
            trains=pays and is_due and self.pause is None,
            reason=reason,
            length=self.length,
            reference_length=self.length if self.reference is None else self.reference,
            generation_s=generation_s,
            saved_s=saved_s,
            lost_s=self.lost_s,
            cost_s=cost_s,
        )


def _next(span: Span | None) -> Span | None:
    return None if span is None else replace(span, num_steps=span.num_steps + 1)
