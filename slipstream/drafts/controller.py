"""Decision of each step on training the draft: seconds lost by a stale draft against seconds that training costs.

A draft falls behind a policy that learns, and is accepted less. For the same tokens, the number of verify iterations is
inverse to the acceptance length, so a step below the reachable length loses

    generation_s x (1 - length / reachable length)

seconds. A deviation that counting noise explains is no loss. Training is due once the seconds lost since earlier
trainings reach the cost of one training, which is then subtracted. A run so spends on training what it loses without
it, which minimises the sum. For if each training recovers a share r of the loss, a policy that moves by d a step leaves
a loss of g = d / (f r) at f trainings a step. The sum f x cost_s + generation_s x g is least where both terms are
equal, whatever r is. A draft that training does not improve costs at most what it loses. Training that cannot save its
cost in the remaining steps is skipped.

The decision is a pure function of the steps' records, so a resumed run decides like an uninterrupted one.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from slipstream.engine.acceptance import combine, sampling_deviation
from slipstream.records.steps import AcceptanceStats, DraftDecision

_WINDOW = 3  # latest steps, whose acceptance is the present one
_NUM_DEVIATIONS = 2.0
_NUM_COSTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """State of a draft after some steps."""

    reference: float | None = None  # highest mean acceptance length of the draft; None before the first drafts
    recent: tuple[AcceptanceStats, ...] = ()  # of the latest steps
    costs_s: tuple[float, ...] = ()  # of each training
    lost_s: float = 0.0  # seconds of generation lost since earlier trainings, minus what those trainings took

    @property
    def length(self) -> float:
        """Mean acceptance length over the latest steps; 1 where nothing was drafted."""
        return combine(self.recent).mean_acceptance_length if self.recent else 1.0

    @property
    def lost(self) -> float:
        """Fraction of generation that is lost because the draft is stale; counting noise is no loss."""
        if self.reference is None or not self.recent:
            return 0.0
        noise = _NUM_DEVIATIONS * sampling_deviation(combine(self.recent))
        return max(0.0, 1.0 - self.length / max(self.reference - noise, 1.0))

    @property
    def cost_s(self) -> float | None:
        """Median seconds of the latest trainings, without the first, which fills caches; None before the second."""
        return statistics.median(self.costs_s[1:][-_NUM_COSTS:]) if len(self.costs_s) > 1 else None

    def observed(self, acceptance: AcceptanceStats | None, generation_s: float) -> Staleness:
        """Return the state after a step's rollouts; a step without drafts changes nothing."""
        if acceptance is None or acceptance.num_drafts == 0:
            return self
        seen = replace(self, recent=(*self.recent, acceptance)[-_WINDOW:])
        seen = replace(seen, reference=max(seen.length, self.reference or 0.0))
        return replace(seen, lost_s=seen.lost_s + generation_s * seen.lost)

    def trained(self, training_s: float) -> Staleness:
        """Return the state after the same step trained the draft for `training_s`."""
        seen = replace(self, costs_s=(*self.costs_s, training_s))
        # A loss above the cost counts towards the next training, up to one training's cost.
        cost_s = seen.cost_s or 0.0
        return replace(seen, lost_s=min(max(0.0, self.lost_s - cost_s), cost_s))

    def decide(self, *, generation_s: float, horizon_steps: int) -> DraftDecision:
        """Decide whether this step trains the draft.

        Args:
            generation_s: generation time of the latest step.
            horizon_steps: number of steps for which a training is expected to help; 0 where no step is left.
        """
        cost_s = self.cost_s or 0.0
        saved_s = horizon_steps * generation_s * self.lost
        pays, is_due = saved_s > cost_s, self.lost_s >= cost_s
        if saved_s == 0.0:
            reason = "nothing is lost"
        elif not pays:
            reason = "it costs more than it saves"
        elif not is_due:
            reason = "less was lost since the last ones than one costs"
        else:
            reason = "its cost is not known yet" if self.cost_s is None else "it pays"
        return DraftDecision(
            trains=pays and is_due,
            reason=reason,
            length=self.length,
            reference_length=self.length if self.reference is None else self.reference,
            generation_s=generation_s,
            saved_s=saved_s,
            lost_s=self.lost_s,
            cost_s=self.cost_s,
        )
