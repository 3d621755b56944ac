"""Is it worth training the draft in this step? Seconds lost for want of training against seconds that training costs.

A policy that learns moves away from its draft, which is then accepted less. With the same tokens to generate, the
number of verify iterations is inverse to the acceptance length, so a step whose length is below the reachable one loses

    generation_s x (1 - length / reachable length)

seconds; what counting noise explains is no loss. A training is due once the seconds that were lost since earlier
trainings come to what one training takes, and it takes them off. So a run spends on trainings what it loses for want of
them, which is least in sum: where each training brings back a share r of the loss, a policy that moves by d a step
leaves a loss of g = d / (f r) at f trainings a step, and f x cost_s + generation_s x g is least where both terms are
equal, whatever r is. A draft that no training improves costs at most what it loses. A training that cannot save its
cost in the steps that are left is left out.

All of it is a pure function of the steps' records, so a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from slipstream.engine.acceptance import combine, sampling_deviation
from slipstream.records.steps import AcceptanceStats, DraftDecision

_WINDOW = 3  # steps whose acceptance counts as the present one
_NUM_DEVIATIONS = 2.0
_NUM_COSTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """What is known of a draft after some steps.

    Attributes:
        reference: mean acceptance length that the draft can reach, as far as is known; None: nothing is known yet.
        recent: acceptance of the last steps.
        costs_s: seconds of each training.
        lost_s: seconds of generation lost since earlier trainings, less what these took.
    """

    reference: float | None = None
    recent: tuple[AcceptanceStats, ...] = ()
    costs_s: tuple[float, ...] = ()
    lost_s: float = 0.0

    @property
    def length(self) -> float:
        """Mean acceptance length of the last steps together; 1 where nothing was drafted."""
        return combine(self.recent).mean_acceptance_length if self.recent else 1.0

    @property
    def lost(self) -> float:
        """Share of generation that goes because the draft is not what it can be; what chance explains is none."""
        if self.reference is None or not self.recent:
            return 0.0
        noise = _NUM_DEVIATIONS * sampling_deviation(combine(self.recent))
        return max(0.0, 1.0 - self.length / max(self.reference - noise, 1.0))

    @property
    def cost_s(self) -> float | None:
        """Median of the last trainings, but the first, which pays for cold caches; None: not measured yet."""
        return statistics.median(self.costs_s[1:][-_NUM_COSTS:]) if len(self.costs_s) > 1 else None

    def observed(self, acceptance: AcceptanceStats | None, generation_s: float) -> Staleness:
        """After the rollouts of another step, which took so long; None, or no drafts, tell nothing."""
        if acceptance is None or acceptance.num_drafts == 0:
            return self
        seen = replace(self, recent=(*self.recent, acceptance)[-_WINDOW:])
        seen = replace(seen, reference=max(seen.length, self.reference or 0.0))
        return replace(seen, lost_s=seen.lost_s + generation_s * seen.lost)

    def trained(self, training_s: float) -> Staleness:
        """After the same step trained the draft, which took so many seconds."""
        seen = replace(self, costs_s=(*self.costs_s, training_s))
        # What is left over counts for the next one, but for no more than that.
        cost_s = seen.cost_s or 0.0
        return replace(seen, lost_s=min(max(0.0, self.lost_s - cost_s), cost_s))

    def decide(self, *, generation_s: float, horizon_steps: int) -> DraftDecision:
        """Decide whether to train the draft now.

        Args:
            generation_s: of the last step.
            horizon_steps: for which a training is expected to last; 0: no step is left.
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
