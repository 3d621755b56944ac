"""What a bake-off compared and what came of it: plain, frozen records, written as JSON beside its page."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.drafts.config import DraftInit, DraftMethod, DraftOnline
from slipstream.statistics import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """One drafter: what proposes tokens, what it was pretrained on, and whether it is trained during RL."""

    method: DraftMethod
    init: DraftInit | None  # None: nothing is pretrained
    online: DraftOnline

    @property
    def name(self) -> str:
        """As a directory and a run may be called."""
        return "-".join([self.method.value, *([] if self.init is None else [self.init.value]), self.online.value])


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One drafter beside the autoregressive arm whose steps were taken in turn with its own; intervals over steps."""

    entrant: Entrant
    num_speculative_tokens: int
    num_steps: int
    mean_acceptance_length: float  # bonus token included
    first_acceptance_length: float  # of the first quarter of the steps
    last_acceptance_length: float  # of the last
    generation: Estimate  # autoregressive seconds over the drafter's
    step: Estimate  # the same of whole steps, training of the draft included
    pretraining_s: float  # with the policy's responses; 0: there was none
    training_s: float  # of the draft, a step on average; 0: there was none
    saved_s: float  # a step, median autoregressive less median own; negative: lost
    reward_difference: Estimate  # own minus autoregressive, over the last quarter of the steps
    machine: str  # on which both were timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """A drafter without a result."""

    entrant: Entrant
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BakeOffRecord:
    """A whole bake-off: every drafter that was asked for is among the results or the dropouts."""

    execution: str
    recipe: str
    workload: str
    dtype: str  # of the learner and the engines
    results: tuple[Result, ...]  # the shortest step first
    dropouts: tuple[Dropout, ...]
