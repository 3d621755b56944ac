"""What an ablation compared and what came of it: plain, frozen records, written as JSON beside its page."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.drafts.config import DraftInit, DraftMethod
from slipstream.statistics import Estimate
from slipstream.types import Workload

TUNED = "tuned"
"""In names and tables: the draft length is chosen by measured time, as in a run of the whole chain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One point of a grid, whatever the seed."""

    workload: Workload
    init: DraftInit
    method: DraftMethod
    loss: str
    num_speculative_tokens: int  # 0: tuned

    @property
    def draft_name(self) -> str:
        """Of the draft, which all draft lengths share."""
        return f"{self.workload.value}-{self.init.value}-{self.method.value}-{self.loss}"

    @property
    def name(self) -> str:
        """Of the setting, as a directory and a run may be called."""
        return f"{self.draft_name}-k{self.num_speculative_tokens or f'-{TUNED}'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One setting with one seed: what is trained once."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """As a directory and a run may be called."""
        return f"{self.setting.name}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One variant beside the autoregressive arm of its workload and seed; intervals are over steps."""

    variant: Variant
    num_speculative_tokens: int  # it drafted with; 0: speculation lost in tuning
    num_steps: int
    generation: Estimate  # autoregressive seconds over the variant's
    step: Estimate
    reward_difference: Estimate  # variant minus autoregressive, over the last quarter of the steps
    mean_acceptance_length: float  # bonus token included
    machine: str  # empty: not recorded
    baseline_machine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A variant without a result."""

    variant: Variant
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One setting over its seeds. Intervals are over seeds and steps, with one seed over steps alone."""

    rank: int  # from 1, within its workload
    setting: Setting
    seeds: tuple[int, ...]  # that it finished with
    lengths: tuple[int, ...]  # k by seed
    generation: Estimate
    step: Estimate
    behind: Estimate | None  # its step time over that of the first of its workload; None: the first, or no common seed
    reward_difference: Estimate
    mean_acceptance_length: float  # mean over the seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationRecord:
    """A whole ablation: every variant of its grid is among the outcomes or the failures."""

    execution: str
    recipe: str
    rows: tuple[Row, ...]  # by workload, the fastest step first
    outcomes: tuple[Outcome, ...]
    failures: tuple[Failure, ...]
