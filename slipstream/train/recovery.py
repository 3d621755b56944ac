"""Engines as the loops see them: lost ones are replaced, memory is shared with the learner, drafting is watched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from slipstream.drafts.config import AutopilotConfig
from slipstream.drafts.length import Decision, constant, decide
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult, Portion
from slipstream.engine.requests import GroupRequest
from slipstream.records.steps import AutopilotStep, RefitCheck, ScheduleEntry
from slipstream.refit.gate import Export, RefitGate
from slipstream.types import Prompt
from slipstream.workers.calls import LostWorkerError, Worker
from slipstream.workers.engines import RemoteEngine
from slipstream.workers.learners import RemoteLearner

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WeightsLostError(RuntimeError):
    """Engines were replaced, and the weights that they should generate with are nowhere any more."""


class Autopilot:
    """Switches drafting off where it measurably loses: `slipstream.drafts.length` decides before each generation.

    What a step did travels in its record, so a resumed run takes up the same thread.

    Args:
        schedule: of the drafts, while there are any.
        steps: what the generations so far did.
    """

    def __init__(
        self,
        config: AutopilotConfig,
        schedule: Sequence[ScheduleEntry],
        steps: Iterable[AutopilotStep | None] = (),
    ) -> None:
        self._config = config
        self._schedule = tuple(schedule)
        self._steps = [step for step in steps if step is not None]

    @property
    def schedule(self) -> tuple[ScheduleEntry, ...]:
        """The table that the next generation drafts by."""
        return self._schedule if decide(self._steps, self._config).speculates else constant(0)

    def noted(self, result: GenerationResult) -> GenerationResult:
        """Count a generation that drafted by `schedule`; without drafts its result has no acceptance."""
        decision = decide(self._steps, self._config)
        num_tokens = sum(len(rollout.token_ids) for group in result.groups for rollout in group.rollouts)
        step = AutopilotStep(
            speculates=decision.speculates,
            is_probe=decision.is_probe,
            token_ms=1e3 * result.generation_s / num_tokens,
            has_switched=decision.has_switched,
        )
        if decision.has_switched:
            _announce(decision, self._config.patience_steps)
        self._steps.append(step)
        return replace(result, autopilot=step, acceptance=result.acceptance if decision.speculates else None)


class FaultTolerantEngines:
    """Engines and their refit gate as one: a loop sees no loss of an engine, until there were too many.

    A lost engine is replaced and refitted, and the call is made again. A batch is sampled again by all engines, from
    the same seed and weights: the step is the one that it would have been. In flight the other engines go on, and a
    group whose engine was lost is sampled again as a whole, from its seeds and the present weights. A lost rank of the
    learner is not recovered here, for its weights are gone.

    Where learner and engines share GPUs, a step goes: the learner offloads its gradients and its optimizer's state,
    engines are refitted and generate, then they sleep without their caches, and the learner trains. Each wakes
    by itself when it is asked to work. The learner offloads before the refit, not after: an engine that is lost
    in a refit restarts, and measures the memory that is free.

    Args:
        is_beside_training: while the engines generate the learner may have other weights than they should.
        memory_sharer: the learner, if it and the engines share GPUs.
        autopilot: decides whether a generation drafts; a generation that failed counts for nothing.
    """

    def __init__(
        self,
        engines: RemoteEngine,
        gate: RefitGate,
        *,
        sampling: SamplingConfig,
        max_restarts: int,
        is_beside_training: bool = False,
        memory_sharer: RemoteLearner | None = None,
        autopilot: Autopilot | None = None,
    ) -> None:
        self._engines = engines
        self._gate = gate
        self._sampling = sampling
        self._max_restarts = max_restarts
        self._is_beside_training = is_beside_training
        self._memory_sharer = memory_sharer
        self._autopilot = autopilot
        self._num_restarts = self._num_reported = 0
        self._num_regenerated = 0  # in flight, and in no portion yet
        self._version = 0
        self._draft_version: int | None = None

    def refit(self, version: int, *, draft_version: int | None) -> RefitCheck:
        """Bring all engines to the learner's present weights.

        Raises:
            LostWorkerError: more engines were lost than may be, or a rank of the learner.
        """
        self._version, self._draft_version = version, draft_version
        return self._recovered(self._refit, is_refit=True)

    def export(self, version: int, *, draft_version: int | None) -> Export:
        """Do the learner's part of `refit`, in which no engine takes part."""
        self._offload_learner()
        return self._gate.export(version, draft_version=draft_version)

    def deliver(self, export: Export) -> RefitCheck:
        """Do the engines' part of `refit`, with the same weights again if an engine was lost. Errors as of `refit`."""
        self._version, self._draft_version = export.version, export.draft_version
        return self._recovered(lambda: self._gate.deliver(export), is_refit=True)

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        """Sample whole groups, as `Engines.generate` says; errors as of `refit`.

        Raises:
            WeightsLostError: an engine was replaced while the learner trained, and the channel keeps no weights.
        """
        num_asked = 0

        def generate() -> GenerationResult:
            nonlocal num_asked
            num_asked += 1
            if self._autopilot is not None:
                self._engines.draft_by(self._autopilot.schedule)
            found = self._engines.generate(prompts, sampling=sampling, group_size=group_size, seed=seed)
            if self._memory_sharer is not None:
                self._engines.sleep()
            return found if self._autopilot is None else self._autopilot.noted(found)

        result = self._recovered(generate)
        num_restarts = self._num_restarts - self._num_reported
        self._num_reported = self._num_restarts
        num_regenerated = (num_asked - 1) * len(prompts) * group_size
        return replace(result, num_engine_restarts=num_restarts, num_regenerated=num_regenerated)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Have `generate` in this block sample with the weights that the engines hold, as no part of a step.

        The learner may have other weights already. Neither the autopilot nor the dealing of prompts learns from it.
        """
        kept = self._autopilot, self._is_beside_training, self._num_reported
        self._autopilot, self._is_beside_training = None, True
        try:
            self._offload_learner()
            with self._engines.unnoted():
                yield
        finally:
            self._autopilot, self._is_beside_training, self._num_reported = kept

    @property
    def under_way(self) -> tuple[GroupRequest, ...]:
        """Groups that were submitted and did not come out of `advance`."""
        return self._engines.under_way

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue these groups in flight, each on the engine with the least to do; errors as of `generate`."""
        to_do = [requests]  # once: what a lost engine was given is known as its own

        def submit() -> None:
            if to_do:
                self._engines.submit(to_do.pop(), sampling=self._sampling)

        self._recovered(submit)

    def advance(self, *, max_s: float) -> Portion:
        """Run all engines until a group is complete, for about `max_s` seconds; errors as of `generate`."""
        portion = self._recovered(lambda: self._engines.advance(max_s=max_s))
        num, self._num_regenerated = self._num_regenerated, 0
        return replace(portion, num_regenerated=num)

    def restart(self, indices: Sequence[int], *, seeds: Callable[[GroupRequest], tuple[int, ...]]) -> int:
        """Restart the unfinished rollouts of these groups with other seeds; how many these were. Errors as above."""
        return self._recovered(lambda: self._engines.restart(indices, seeds=seeds))

    def _refit(self) -> RefitCheck:
        self._offload_learner()
        return self._gate.refit(self._version, draft_version=self._draft_version)

    def _offload_learner(self) -> None:
        if self._memory_sharer is not None:
            self._memory_sharer.offload()

    def _refit_again(self) -> None:
        if not self._is_beside_training:
            self._refit()
        elif not self._gate.deliver_again(self._version):
            raise WeightsLostError(
                f"no engine can be given policy version {self._version} again: the learner has left it"
            )

    def _recovered(self, call: Callable[[], T], *, is_refit: bool = False) -> T:
        """Make a call, and again if an engine was lost in it: after the others have a new one beside them."""
        lost: Sequence[Worker] = ()
        stranded: list[GroupRequest] = []
        needs_weights = False
        while True:
            try:
                if lost:
                    stranded += self._engines.take_lost([worker.name for worker in lost])
                    self._engines.replace(lost)
                    self._gate.engines_changed()
                    lost, needs_weights = (), not is_refit
                if needs_weights:
                    self._refit_again()
                    needs_weights = False
                if is_refit:
                    result = call()
                    self._submit_again(stranded)
                    return result
                self._submit_again(stranded)
                return call()
            except LostWorkerError as error:  # of those that take the place of lost ones too
                lost = self._replaceable(error)

    def _submit_again(self, stranded: list[GroupRequest]) -> None:
        """Submit what lost engines had; if another is lost in this, the groups count as its own."""
        requests = list(stranded)
        stranded.clear()
        if requests:
            self._num_regenerated += sum(len(request.seeds) for request in requests)
            self._engines.submit(requests, sampling=self._sampling)

    def _replaceable(self, error: LostWorkerError) -> Sequence[Worker]:
        """The lost engines, counted; raises the error if they may not be replaced."""
        running = [engine.name for engine in self._engines.workers]
        lost = [worker for worker in error.workers if worker.name in running]
        if len(lost) < len(error.workers) or self._num_restarts + len(lost) > self._max_restarts:
            raise error
        self._num_restarts += len(lost)
        logger.error("%s; restart %d of at most %d in this run", error, self._num_restarts, self._max_restarts)
        return lost


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
