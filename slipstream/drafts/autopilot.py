"""Does speculation still pay? Decided from what the steps of a run cost, and from nothing else.

The cost of a step is its generation time over its generated tokens. A run goes one way, drafting or not, and measures
the other in single steps (probes): as soon as there is something to compare with, then at growing intervals, and at
once when the way it goes seems to lose. It turns round when every one of the last `patience_steps` cost more, by
`margin`, than two probes of the other way that are no older than those steps. So one odd step turns nothing, and a run
that resumes decides as if it had never stopped: the decision is a function of the steps' records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from slipstream.config import Checked, NonNegativeFloat, ge
from slipstream.records.steps import NUM_WARMUP_STEPS, AutopilotStep

_NUM_PROBES = 2  # that must agree
_MAX_BACK_OFF = 8  # times `probe_every_steps`


@dataclass(frozen=True, kw_only=True)
class AutopilotConfig(Checked, path="draft.autopilot"):
    """When the speculative arm stops drafting, and how it finds back."""

    enabled: bool = False
    patience_steps: Annotated[int, ge(_NUM_PROBES)] = 3  # that must lose
    probe_every_steps: Annotated[int, ge(1)] = 8  # at first; twice as rarely after each probe, down to an eighth
    margin: NonNegativeFloat = 0.05  # a way loses if it costs so much more, as a fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the next step does."""

    speculates: bool
    is_probe: bool
    has_switched: bool
    own_ms: float | None = None  # median cost of the way that was gone, over the last steps; None: not yet known
    other_ms: float | None = None  # the last cost of the other


def decide(steps: Sequence[AutopilotStep], config: AutopilotConfig) -> Decision:
    """What to do after `steps`: go on, probe the other way for a step, or turn round."""
    state = _State(config=config)
    for index, step in enumerate(steps):
        state.add(index, step)
    return state.decision(len(steps))


@dataclass
class _State:
    """Where a run stands after its steps."""

    config: AutopilotConfig
    speculates: bool = True
    interval: int = field(init=False)
    last_look: int = 0  # number of the last step that looked at the other way
    costs: dict[bool, list[tuple[int, float]]] = field(default_factory=lambda: {True: [], False: []})

    def __post_init__(self) -> None:
        self.interval = self.config.probe_every_steps

    def add(self, index: int, step: AutopilotStep) -> None:
        if step.is_probe:
            self.interval = min(2 * self.interval, _MAX_BACK_OFF * self.config.probe_every_steps)
            self.last_look = index
        elif step.speculates != self.speculates:
            self.speculates, self.interval, self.last_look = step.speculates, self.config.probe_every_steps, index
        if index >= NUM_WARMUP_STEPS:  # the first pays for allocations
            self.costs[step.speculates].append((index, step.token_ms))

    def decision(self, now: int) -> Decision:
        patience = self.config.patience_steps
        own = [cost for _, cost in self.costs[self.speculates][-patience:]]
        other = self.costs[not self.speculates]
        if len(own) < patience:
            return self._go(other_way=False)
        known = {"own_ms": sorted(own)[patience // 2], "other_ms": other[-1][1] if other else None}
        if not other:
            return self._go(other_way=True, is_probe=True, **known)
        loses = [min(own) > (1 + self.config.margin) * cost for _, cost in other[-_NUM_PROBES:]]
        fresh = [now - index <= patience for index, _ in other[-_NUM_PROBES:]]
        if all(loses) and all(fresh) and len(loses) == _NUM_PROBES:
            return self._go(other_way=True, **known)
        if loses[-1] or now - self.last_look >= self.interval:
            return self._go(other_way=True, is_probe=True, **known)
        return self._go(other_way=False, **known)

    def _go(self, *, other_way: bool, is_probe: bool = False, **known: float | None) -> Decision:
        return Decision(
            speculates=self.speculates != other_way,
            is_probe=is_probe,
            has_switched=other_way and not is_probe,
            **known,
        )
