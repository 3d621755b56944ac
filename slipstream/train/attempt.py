"""One attempt at an arm, from its last checkpoint on: the loop that trains it, and what it sees of the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.data.prompts import PromptStream
from slipstream.grpo.loop_config import KvCache
from slipstream.recipe import Recipe
from slipstream.records.steps import AutopilotStep, ScheduleEntry, StepRecord
from slipstream.rewards.verifier import RewardResult
from slipstream.train.acceptance_guard import AcceptanceGuard
from slipstream.train.asynchronous.in_flight import InFlightLoop
from slipstream.train.asynchronous.lasting import LastingInFlight, ReplaceableInFlight
from slipstream.train.asynchronous.meeting import Meeting
from slipstream.train.asynchronous.one_step_off import OneStepOffLoop
from slipstream.train.asynchronous.pending import Pending, Tally
from slipstream.train.autopilot_engines import PilotedEngines, SwitchableEngines
from slipstream.train.in_turn import EnginesInTurn, GateInTurn, Resting
from slipstream.train.loop import SyncLoop
from slipstream.train.metrics import StageClock
from slipstream.train.recovery import Gate, LastingEngines, ReplaceableEngines
from slipstream.train.step import Draft, Learner, Trainer
from slipstream.types import Arm, LoopMode, Prompt, RolloutGroup


class RestingLearner(Learner, Resting, Protocol):
    """A learner that can give memory back."""


class OnStep(Protocol):
    """Gets each step's record before the next one starts."""

    def __call__(self, record: StepRecord, waiting: Pending | None = None) -> None:
        """`waiting`: what is generated and not trained on, in a loop that has such, where a checkpoint is due."""
        ...


class Engines(SwitchableEngines, ReplaceableInFlight, Resting, Protocol):
    """Engines that any of the loops can train with."""

    def run_in_flight(self, kv_cache: KvCache | None) -> None:
        """Begin to generate in flight, with nothing under way."""
        ...


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What every loop trains with.

    Attributes:
        schedule: of the drafts; None without any.
        start_clock: of a step, once it is its turn.
        meeting: of this attempt alone.
    """

    recipe: Recipe
    arm: Arm
    schedule: tuple[ScheduleEntry, ...] | None
    prompts: tuple[Prompt, ...]
    score: Callable[[Sequence[RolloutGroup]], RewardResult]
    learner: RestingLearner
    engines: Engines
    gate: Gate
    draft: Draft
    guard: AcceptanceGuard
    on_step: OnStep
    start_clock: Callable[[], StageClock]
    meeting: Meeting
    tally: Tally

    def run(self, history: Sequence[StepRecord], pending: Pending) -> None:
        """Train to the end, after the steps of `history`."""
        if self.recipe.loop.is_synchronous:
            self._synchronous(history).run(start_step=len(history))
            return
        if self.recipe.loop.mode is LoopMode.ONE_STEP_OFF:
            self._one_step_off(history, pending).run(start_step=len(history))
            return
        self.engines.run_in_flight(self.recipe.loop.kv_cache)  # and forget what an earlier attempt left under way
        self._in_flight(pending).run(start_step=len(history))

    def _synchronous(self, history: Sequence[StepRecord]) -> SyncLoop:
        lasting = self._lasting(history, Pending())
        return SyncLoop(
            arm=self.arm,
            engine=lasting,
            learner=self.learner,
            prompts=self._stream,
            score=self.score,
            config=self.recipe.grpo,
            sampling=self.recipe.sampling,
            gate=lasting,
            on_step=self.on_step,
            draft=self.draft,
            guard=self.guard,
            start_clock=self.start_clock,
        )

    def _one_step_off(self, history: Sequence[StepRecord], pending: Pending) -> OneStepOffLoop:
        lasting = self._lasting(history, pending)
        return OneStepOffLoop(
            arm=self.arm,
            engine=lasting,
            gate=lasting,
            prompts=self._stream,
            score=self.score,
            trainer=self._trainer,
            sampling=self.recipe.sampling,
            lag=self.recipe.loop.max_off_policy_steps,
            on_step=self.on_step,
            start_clock=self.start_clock,
            meeting=self.meeting,
            pending=pending,
            tally=self.tally,
        )

    def _in_flight(self, pending: Pending) -> InFlightLoop:
        lasting = LastingInFlight(
            self.engines,
            self.gate,
            sampling=self.recipe.sampling,
            max_restarts=self.recipe.engine.max_restarts,
        )
        return InFlightLoop(
            arm=self.arm,
            engine=lasting,
            prompts=self._stream,
            score=self.score,
            trainer=self._trainer,
            sampling=self.recipe.sampling,
            loop=self.recipe.loop,
            on_step=self.on_step,
            start_clock=self.start_clock,
            meeting=self.meeting,
            pending=pending,
            tally=self.tally,
        )

    @property
    def _stream(self) -> PromptStream:
        grpo = self.recipe.grpo
        return PromptStream(prompts=self.prompts, batch_size=grpo.prompts_per_step, seed=grpo.seed)

    @property
    def _trainer(self) -> Trainer:
        return Trainer(
            learner=self.learner,
            config=self.recipe.grpo,
            temperature=self.recipe.sampling.temperature,
            draft=self.draft,
            guard=self.guard,
            max_lag=self.recipe.loop.max_off_policy_steps,
        )

    def _lasting(self, history: Sequence[StepRecord], pending: Pending) -> LastingEngines:
        steps = [record.autopilot for record in history]
        steps += [each.generated.result.autopilot for each in pending.scored]
        engines: ReplaceableEngines = piloted(self.engines, self.recipe, self.schedule, steps)
        gate: Gate = self.gate
        if self.recipe.placement.takes_turns:
            engines, gate = EnginesInTurn(engines, self.engines), GateInTurn(gate, self.learner)
        return LastingEngines(
            engines,
            gate,
            max_restarts=self.recipe.engine.max_restarts,
            is_beside_training=not self.recipe.loop.is_synchronous,
        )


def piloted(
    engines: SwitchableEngines,
    recipe: Recipe,
    schedule: Sequence[ScheduleEntry] | None,
    steps: Sequence[AutopilotStep | None],
) -> ReplaceableEngines:
    """The engines, watched by the autopilot of speculation if the recipe has one and they speculate.

    Args:
        schedule: of the drafts; None without any.
        steps: what the generations so far did.
    """
    config = recipe.draft.autopilot
    if schedule is None or not config.enabled:
        return engines
    return PilotedEngines(engines, config=config, schedule=schedule, steps=steps)
